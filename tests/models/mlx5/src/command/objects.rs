// SPDX-License-Identifier: MIT OR Apache-2.0

//! Commands for objects without a context: UARs, PDs, XRC domains, transport domains.

use super::{Outcome, refuse};
use crate::layout::ifc::*;
use crate::model::Model;

pub(super) fn alloc_uar(model: &mut Model<'_>, _: &[u8], output: &mut [u8]) -> Outcome {
    let uar = model
        .hca
        .objects
        .uars
        .add(())
        .ok_or(refuse!(MLX5_CMD_STAT_NO_RES_ERR))?;
    alloc_uar_out::UAR.set(output, uar);
    Ok(())
}

pub(super) fn dealloc_uar(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let uar = dealloc_uar_in::UAR.get32(input);
    let used = model.hca.objects.eqs.iter().any(|(_, eq)| eq.uar == uar)
        || model.hca.objects.cqs.iter().any(|(_, cq)| cq.uar == uar)
        || model.hca.objects.qps.iter().any(|(_, qp)| qp.uar == uar);
    if used {
        return Err(refuse!(MLX5_CMD_STAT_RES_BUSY));
    }
    model
        .hca
        .objects
        .uars
        .remove(uar)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))
}

pub(super) fn alloc_pd(model: &mut Model<'_>, _: &[u8], output: &mut [u8]) -> Outcome {
    let pd = model.hca.objects.pds.add(()).ok_or(refuse!(MLX5_CMD_STAT_NO_RES_ERR))?;
    alloc_pd_out::PD.set(output, pd);
    Ok(())
}

pub(super) fn dealloc_pd(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let pd = dealloc_pd_in::PD.get32(input);
    let used = model.hca.objects.qps.iter().any(|(_, qp)| qp.pd == pd)
        || model.hca.objects.srqs.iter().any(|(_, srq)| srq.pd == pd);
    if used {
        return Err(refuse!(MLX5_CMD_STAT_RES_BUSY));
    }
    model
        .hca
        .objects
        .pds
        .remove(pd)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))
}

pub(super) fn alloc_xrcd(model: &mut Model<'_>, _: &[u8], output: &mut [u8]) -> Outcome {
    let xrcd = model
        .hca
        .objects
        .xrcds
        .add(())
        .ok_or(refuse!(MLX5_CMD_STAT_NO_RES_ERR))?;
    alloc_xrcd_out::XRCD.set(output, xrcd);
    Ok(())
}

pub(super) fn dealloc_xrcd(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let xrcd = dealloc_xrcd_in::XRCD.get32(input);
    let used = model.hca.objects.qps.iter().any(|(_, qp)| qp.xrcd == Some(xrcd))
        || model.hca.objects.srqs.iter().any(|(_, srq)| srq.xrcd == Some(xrcd));
    if used {
        return Err(refuse!(MLX5_CMD_STAT_RES_BUSY));
    }
    model
        .hca
        .objects
        .xrcds
        .remove(xrcd)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))
}

/// Executes ALLOC_TRANSPORT_DOMAIN. Transport domains belong to flow steering, which the model does not have, but every
/// process of user space allocates one.
pub(super) fn alloc_transport_domain(model: &mut Model<'_>, _: &[u8], output: &mut [u8]) -> Outcome {
    let domain = model
        .hca
        .objects
        .transport_domains
        .add(())
        .ok_or(refuse!(MLX5_CMD_STAT_NO_RES_ERR))?;
    alloc_transport_domain_out::TRANSPORT_DOMAIN.set(output, domain);
    Ok(())
}

pub(super) fn dealloc_transport_domain(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let domain = dealloc_transport_domain_in::TRANSPORT_DOMAIN.get32(input);
    model
        .hca
        .objects
        .transport_domains
        .remove(domain)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! Multicast group commands.

use p2pmem_ib::Gid;

use super::{CommandError, Outcome, refuse};
use crate::caps::limit;
use crate::layout::ifc::*;
use crate::model::Model;

fn group(bytes: &[u8]) -> Result<Gid, CommandError> {
    let gid = <[u8; 16]>::try_from(bytes).map(Gid);
    gid.ok()
        .filter(Gid::is_multicast)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR))
}

pub(super) fn attach(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let qpn = attach_to_mcg_in::QPN.get32(input);
    let group = group(attach_to_mcg_in::MULTICAST_GID.of(input))?;
    let all = model.hca.objects.qps.iter();
    let members = all.filter(|(_, qp)| qp.groups.contains(&group)).count();
    if members >= limit::MULTICAST_QPS as usize {
        return Err(refuse!(MLX5_CMD_STAT_LIM_ERR));
    }
    let qp = model
        .hca
        .objects
        .qps
        .get_mut(qpn)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))?;
    if qp.groups.contains(&group) {
        return Ok(());
    }
    model
        .engine
        .attach(qpn, group)
        .map_err(|_| refuse!(MLX5_CMD_STAT_BAD_RES_STATE_ERR))?;
    qp.groups.push(group);
    Ok(())
}

pub(super) fn detach(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let qpn = detach_from_mcg_in::QPN.get32(input);
    let group = group(detach_from_mcg_in::MULTICAST_GID.of(input))?;
    let qp = model
        .hca
        .objects
        .qps
        .get_mut(qpn)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))?;
    model
        .engine
        .detach(qpn, group)
        .map_err(|_| refuse!(MLX5_CMD_STAT_BAD_RES_STATE_ERR))?;
    qp.groups.retain(|member| *member != group);
    Ok(())
}

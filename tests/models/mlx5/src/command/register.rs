// SPDX-License-Identifier: MIT OR Apache-2.0

//! ACCESS_REG: access registers of the port and the board.

use super::{Outcome, refuse};
use crate::layout::{constants, ifc::*};
use crate::model::Model;

/// `op_mod` of a read; 0 is a write.
const READ: u32 = 1;
/// Number of the only port.
const PORT: u32 = 1;
/// PTYS: protocol bit of InfiniBand.
const PROTOCOL_INFINIBAND: u32 = 1;
/// PTYS: bits of all link speeds up to HDR.
const SPEEDS: u32 = 0x7f;
/// PTYS: HDR, 50 Gb/s per lane.
const SPEED: u32 = 1 << 6;
/// PTYS: link widths 1x and 4x.
const WIDTHS: u32 = constants::MLX5_PTYS_WIDTH_1X | constants::MLX5_PTYS_WIDTH_4X;
/// PMTU: maximum packet payload in bytes.
const MTU: u32 = 4096;
/// PVLC: virtual lanes VL0 to VL3.
const LANES: u32 = 4;
/// PAOS: port states.
const UP: u32 = 1;
const DOWN: u32 = 2;

pub(super) fn access(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let register = access_register_in::REGISTER_ID.get32(input);
    let read = match access_register_in::OP_MOD.get32(input) {
        0 => false,
        READ => true,
        _ => return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR)),
    };
    let from = access_register_in::REGISTER_DATA.of(input);
    let to = access_register_out::REGISTER_DATA.of_mut(output);
    // The output starts as a copy of the input, which contains the selectors.
    let len = from.len().min(to.len());
    to[..len].copy_from_slice(&from[..len]);
    let needed = match register {
        constants::MLX5_REG_HOST_ENDIANNESS => 16,
        constants::MLX5_REG_NODE_DESC => 64,
        constants::MLX5_REG_PTYS => ptys_reg::BYTES,
        constants::MLX5_REG_PMTU => pmtu_reg::BYTES,
        constants::MLX5_REG_PVLC => pvlc_reg::BYTES,
        constants::MLX5_REG_PAOS => paos_reg::BYTES,
        constants::MLX5_REG_PPCNT => ppcnt_reg::BYTES,
        _ => {
            tracing::info!(register = format_args!("{register:#x}"), "unknown access register");
            model.hca.counters.unknown_register(register);
            return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
        }
    };
    if len < needed {
        return Err(refuse!(MLX5_CMD_STAT_BAD_INP_LEN_ERR));
    }
    match (register, read) {
        // The register reports the byte order of the driver's CPU. The model uses big-endian everywhere.
        (constants::MLX5_REG_HOST_ENDIANNESS, _) => Ok(()),
        (constants::MLX5_REG_NODE_DESC, true) => {
            to[..needed].copy_from_slice(&model.hca.objects.node_description);
            Ok(())
        }
        (constants::MLX5_REG_NODE_DESC, false) => {
            model.hca.objects.node_description.copy_from_slice(&from[..needed]);
            Ok(())
        }
        (constants::MLX5_REG_PTYS, true) => port_type(to),
        (constants::MLX5_REG_PMTU, true) => {
            check_port(pmtu_reg::LOCAL_PORT.get32(to))?;
            for field in [pmtu_reg::MAX_MTU, pmtu_reg::ADMIN_MTU, pmtu_reg::OPER_MTU] {
                field.set(to, MTU);
            }
            Ok(())
        }
        (constants::MLX5_REG_PVLC, true) => {
            check_port(pvlc_reg::LOCAL_PORT.get32(to))?;
            for field in [pvlc_reg::VL_HW_CAP, pvlc_reg::VL_ADMIN, pvlc_reg::VL_OPERATIONAL] {
                field.set(to, LANES);
            }
            Ok(())
        }
        (constants::MLX5_REG_PAOS, true) => {
            check_port(paos_reg::LOCAL_PORT.get32(to))?;
            let status = |up| if up { UP } else { DOWN };
            paos_reg::ADMIN_STATUS.set(to, status(true));
            paos_reg::OPER_STATUS.set(to, status(model.hca.port_up()));
            Ok(())
        }
        (constants::MLX5_REG_PPCNT, true) => super::statistics::port_counters(model, to),
        _ => Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR)),
    }
}

pub(super) fn check_port(port: u32) -> Outcome {
    if port != PORT {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    Ok(())
}

fn port_type(register: &mut [u8]) -> Outcome {
    check_port(ptys_reg::LOCAL_PORT.get32(register))?;
    if ptys_reg::PROTO_MASK.get32(register) & PROTOCOL_INFINIBAND == 0 {
        // The model has no Ethernet.
        return Ok(());
    }
    ptys_reg::IB_LINK_WIDTH_CAPABILITY.set(register, WIDTHS);
    ptys_reg::IB_LINK_WIDTH_ADMIN.set(register, WIDTHS);
    ptys_reg::IB_LINK_WIDTH_OPER.set(register, constants::MLX5_PTYS_WIDTH_4X);
    ptys_reg::IB_PROTO_CAPABILITY.set(register, SPEEDS);
    ptys_reg::IB_PROTO_ADMIN.set(register, SPEEDS);
    ptys_reg::IB_PROTO_OPER.set(register, SPEED);
    Ok(())
}

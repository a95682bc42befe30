// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory key commands and PAGE_FAULT_RESUME.

use super::{CommandError, Outcome, refuse};
use crate::adapter::{Adapter, DrainTimeout};
use crate::layout::ifc::*;
use crate::mkey;
use crate::model::Model;

fn command_error(error: mkey::MkeyError) -> CommandError {
    tracing::debug!(%error, "memory key command refused");
    match error {
        mkey::MkeyError::Short => refuse!(MLX5_CMD_STAT_BAD_INP_LEN_ERR),
        mkey::MkeyError::Parameter(_) => refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR),
        mkey::MkeyError::NoKey => refuse!(MLX5_CMD_STAT_BAD_RES_ERR),
        mkey::MkeyError::Full => refuse!(MLX5_CMD_STAT_NO_RES_ERR),
    }
}

pub(super) fn create(adapter: &Adapter, input: &[u8], output: &mut [u8]) -> Outcome {
    let index = adapter.hca().objects.mkeys.create(input).map_err(command_error)?;
    create_mkey_out::MKEY_INDEX.set(output, index);
    Ok(())
}

/// Executes DESTROY_MKEY: no new access may begin, then the transfers in flight drain, then the mkey is removed. If the
/// transfers do not end in time, the command fails. The mkey stays unusable, and the driver can repeat the command.
pub(super) fn destroy(adapter: &Adapter, input: &[u8], _: &mut [u8]) -> Outcome {
    let index = destroy_mkey_in::MKEY_INDEX.get32(input);
    let mut hca = adapter.hca();
    hca.objects.mkeys.retire(index).map_err(command_error)?;
    adapter
        .drain(hca, index)
        .map_err(|DrainTimeout| refuse!(MLX5_CMD_STAT_INT_ERR))?;
    adapter.hca().objects.mkeys.destroy(index).map_err(command_error)
}

pub(super) fn query(adapter: &Adapter, input: &[u8], output: &mut [u8]) -> Outcome {
    let index = query_mkey_in::MKEY_INDEX.get32(input);
    adapter.hca().objects.mkeys.query(index, output).map_err(command_error)
}

/// Executes PAGE_FAULT_RESUME: retries or fails the accesses that wait for the fault. An unknown token is no error,
/// because the adapter may have dropped the fault in the meantime.
pub(super) fn page_fault_resume(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let info = page_fault_resume_in::PAGE_FAULT_INFO.of(input);
    let high = mem_page_fault_info::FAULT_TOKEN_47_32.get(info);
    let token = (high << 32) | mem_page_fault_info::FAULT_TOKEN_31_0.get(info);
    let failed = mem_page_fault_info::ERROR.is_set(info);
    model.hca.objects.faults.remove(&token);
    if let Some(resumed) = model.hca.objects.mkeys.resume_fault(token, failed) {
        model.engine.resume(token, resumed == mkey::Resumed::Repaired);
    }
    Ok(())
}

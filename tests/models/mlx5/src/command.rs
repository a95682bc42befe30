// SPDX-License-Identifier: MIT OR Apache-2.0

//! Command interface: fetches commands from the command queue, executes them and writes their output.
//!
//! A command is an entry of the command queue (`cmd_layout`) with 16 bytes of inline input and output, plus chains of
//! mailboxes for the rest. If the adapter cannot read or write a part of the command, it reports a delivery status in
//! the entry. If the content of a command is invalid, the adapter reports a status and a syndrome in the output. A
//! refused command changes nothing.

mod cq;
mod eq;
mod hca;
mod mkey;
mod multicast;
mod objects;
mod qp;
mod register;
mod srq;
mod statistics;
#[cfg(test)]
mod tests;
mod vport;

use std::sync::Arc;

use p2pmem_vfio_user::{Dma, DmaError};
use tracing::{debug, info, warn};

use super::adapter::Adapter;
use super::counters::Counters;
use super::eq::Eqe;
use super::inbox::Message;
use super::layout::wire::{cmd_layout, cmd_prot_block};
use super::layout::{constants, ifc, op};
use super::model::{Hca, Model};
use super::registers::{LOG_COMMAND_ENTRIES, LOG_COMMAND_STRIDE};

/// Entry type: PCI command transport, the only supported type.
const TRANSPORT: u32 = constants::MLX5_PCI_CMD_XPORT;
/// Bytes of data per mailbox.
const BLOCK: usize = constants::MLX5_CMD_DATA_BLOCK_SIZE as usize;
/// Bytes of inline input, and of inline output, in an entry.
const INLINE: usize = 16;
/// Minimum length of input (opcode and modifier) and output (status and syndrome) in bytes.
const MIN_LENGTH: usize = 8;
/// Maximum length of input or output in bytes. The longest commands register memory, with 8 bytes per page.
const MAX_LENGTH: usize = 16 << 20;
/// Mask of the address in a mailbox pointer. The low bits are reserved.
const MAILBOX_ADDRESS: u64 = !0x3ff;

/// Status and syndrome of a refused command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CommandError {
    status: u32,
    /// Identifies the check that failed. The driver prints the syndrome.
    syndrome: u32,
}

/// Creates a [`CommandError`]. The syndrome contains the source line of the check.
macro_rules! refuse {
    ($status:ident) => {
        $crate::command::CommandError::new($crate::layout::constants::$status, line!())
    };
}
pub(super) use refuse;
pub(super) use srq::SrqKind;
pub(super) use statistics::{CounterSet, since as link_since};
pub(super) use vport::capability as port_capability;

impl CommandError {
    pub(super) const fn new(status: u32, line: u32) -> Self {
        Self {
            status,
            syndrome: 0x00d0_0000 | line,
        }
    }
}

/// Result of a command.
pub(super) type Outcome = Result<(), CommandError>;

/// Function that executes a command. Input and output are at least as long as the structures of the command.
#[derive(Clone, Copy)]
enum Handler {
    /// Runs on the transport worker with exclusive access to the adapter.
    Model(fn(&mut Model<'_>, &[u8], &mut [u8]) -> Outcome),
    /// A memory key command: runs on the command worker while payload may be in flight.
    Mkey(fn(&Adapter, &[u8], &mut [u8]) -> Outcome),
}

/// State of the HCA that a command requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// No requirement.
    Any,
    /// ENABLE_HCA was executed.
    Enabled,
    /// INIT_HCA was executed.
    Initialised,
}

/// Requirements and handler of a supported command.
struct CommandSpec {
    phase: Phase,
    input: usize,
    output: usize,
    handler: Handler,
}

/// Builds a [`CommandSpec`] from the phase, the input and output structures, and the handler.
macro_rules! spec {
    ($phase:ident, $input:ident, $output:ident, $handler:expr) => {
        spec!($phase, $input, $output, Model $handler)
    };
    ($phase:ident, $input:ident, $output:ident, $kind:ident $handler:expr) => {
        CommandSpec {
            phase: Phase::$phase,
            input: ifc::$input::BYTES,
            output: ifc::$output::BYTES,
            handler: Handler::$kind($handler),
        }
    };
}

/// Returns the specification of a supported opcode.
#[rustfmt::skip]
fn find(opcode: u16) -> Option<CommandSpec> {
    Some(match opcode {
        op::ENABLE_HCA => spec!(Any, enable_hca_in, enable_hca_out, hca::enable),
        op::DISABLE_HCA => spec!(Any, disable_hca_in, disable_hca_out, hca::disable),
        op::QUERY_ISSI => spec!(Any, query_issi_in, query_issi_out, hca::query_issi),
        op::SET_ISSI => spec!(Any, set_issi_in, set_issi_out, hca::set_issi),
        op::QUERY_PAGES => spec!(Enabled, query_pages_in, query_pages_out, hca::query_pages),
        op::MANAGE_PAGES => spec!(Enabled, manage_pages_in, manage_pages_out, hca::manage_pages),
        op::QUERY_HCA_CAP => spec!(Enabled, query_hca_cap_in, query_hca_cap_out, hca::query_cap),
        op::SET_HCA_CAP => spec!(Enabled, set_hca_cap_in, set_hca_cap_out, hca::set_cap),
        op::INIT_HCA => spec!(Enabled, init_hca_in, init_hca_out, hca::init),
        op::TEARDOWN_HCA => spec!(Enabled, teardown_hca_in, teardown_hca_out, hca::teardown),
        op::QUERY_ADAPTER => spec!(Enabled, query_adapter_in, query_adapter_out, hca::query_adapter),
        op::SET_DRIVER_VERSION => spec!(Enabled, set_driver_version_in, set_driver_version_out, hca::set_driver_version),
        op::NOP => spec!(Any, nop_in, nop_out, hca::nop),
        op::QUERY_SPECIAL_CONTEXTS => spec!(Initialised, query_special_contexts_in, query_special_contexts_out, hca::special_contexts),
        op::ACCESS_REG => spec!(Enabled, access_register_in, access_register_out, register::access),
        op::ALLOC_UAR => spec!(Initialised, alloc_uar_in, alloc_uar_out, objects::alloc_uar),
        op::DEALLOC_UAR => spec!(Initialised, dealloc_uar_in, dealloc_uar_out, objects::dealloc_uar),
        op::ALLOC_PD => spec!(Initialised, alloc_pd_in, alloc_pd_out, objects::alloc_pd),
        op::DEALLOC_PD => spec!(Initialised, dealloc_pd_in, dealloc_pd_out, objects::dealloc_pd),
        op::ALLOC_XRCD => spec!(Initialised, alloc_xrcd_in, alloc_xrcd_out, objects::alloc_xrcd),
        op::DEALLOC_XRCD => spec!(Initialised, dealloc_xrcd_in, dealloc_xrcd_out, objects::dealloc_xrcd),
        op::ALLOC_TRANSPORT_DOMAIN => spec!(Initialised, alloc_transport_domain_in, alloc_transport_domain_out, objects::alloc_transport_domain),
        op::DEALLOC_TRANSPORT_DOMAIN => spec!(Initialised, dealloc_transport_domain_in, dealloc_transport_domain_out, objects::dealloc_transport_domain),
        op::CREATE_EQ => spec!(Initialised, create_eq_in, create_eq_out, eq::create),
        op::DESTROY_EQ => spec!(Initialised, destroy_eq_in, destroy_eq_out, eq::destroy),
        op::QUERY_EQ => spec!(Initialised, query_eq_in, query_eq_out, eq::query),
        op::CREATE_CQ => spec!(Initialised, create_cq_in, create_cq_out, cq::create),
        op::DESTROY_CQ => spec!(Initialised, destroy_cq_in, destroy_cq_out, cq::destroy),
        op::QUERY_CQ => spec!(Initialised, query_cq_in, query_cq_out, cq::query),
        op::MODIFY_CQ => spec!(Initialised, modify_cq_in, modify_cq_out, cq::modify),
        op::CREATE_MKEY => spec!(Initialised, create_mkey_in, create_mkey_out, Mkey mkey::create),
        op::DESTROY_MKEY => spec!(Initialised, destroy_mkey_in, destroy_mkey_out, Mkey mkey::destroy),
        op::QUERY_MKEY => spec!(Initialised, query_mkey_in, query_mkey_out, Mkey mkey::query),
        op::PAGE_FAULT_RESUME => spec!(Initialised, page_fault_resume_in, page_fault_resume_out, mkey::page_fault_resume),
        op::CREATE_QP => spec!(Initialised, create_qp_in, create_qp_out, qp::create),
        op::DESTROY_QP => spec!(Initialised, destroy_qp_in, destroy_qp_out, qp::destroy),
        op::QUERY_QP => spec!(Initialised, query_qp_in, query_qp_out, qp::query),
        op::RST2INIT_QP => spec!(Initialised, rst2init_qp_in, rst2init_qp_out, qp::modify),
        op::INIT2INIT_QP => spec!(Initialised, init2init_qp_in, init2init_qp_out, qp::modify),
        op::INIT2RTR_QP => spec!(Initialised, init2rtr_qp_in, init2rtr_qp_out, qp::modify),
        op::RTR2RTS_QP => spec!(Initialised, rtr2rts_qp_in, rtr2rts_qp_out, qp::modify),
        op::RTS2RTS_QP => spec!(Initialised, rts2rts_qp_in, rts2rts_qp_out, qp::modify),
        op::SQERR2RTS_QP => spec!(Initialised, sqerr2rts_qp_in, sqerr2rts_qp_out, qp::modify),
        op::SQD_RTS_QP => spec!(Initialised, sqd2rts_qp_in, sqd2rts_qp_out, qp::modify),
        op::_2ERR_QP => spec!(Initialised, qp_2err_in, qp_2err_out, qp::to_error_or_reset),
        op::_2RST_QP => spec!(Initialised, qp_2rst_in, qp_2rst_out, qp::to_error_or_reset),
        op::CREATE_SRQ => spec!(Initialised, create_srq_in, create_srq_out, srq::create),
        op::DESTROY_SRQ => spec!(Initialised, destroy_srq_in, destroy_srq_out, srq::destroy),
        op::QUERY_SRQ => spec!(Initialised, query_srq_in, query_srq_out, srq::query),
        op::ARM_RQ => spec!(Initialised, arm_rq_in, arm_rq_out, srq::arm),
        op::CREATE_XRC_SRQ => spec!(Initialised, create_xrc_srq_in, create_xrc_srq_out, srq::create_xrc),
        op::DESTROY_XRC_SRQ => spec!(Initialised, destroy_xrc_srq_in, destroy_xrc_srq_out, srq::destroy_xrc),
        op::QUERY_XRC_SRQ => spec!(Initialised, query_xrc_srq_in, query_xrc_srq_out, srq::query_xrc),
        op::ARM_XRC_SRQ => spec!(Initialised, arm_xrc_srq_in, arm_xrc_srq_out, srq::arm_xrc),
        op::CREATE_RMP => spec!(Initialised, create_rmp_in, create_rmp_out, srq::create_rmp),
        op::DESTROY_RMP => spec!(Initialised, destroy_rmp_in, destroy_rmp_out, srq::destroy_rmp),
        op::QUERY_RMP => spec!(Initialised, query_rmp_in, query_rmp_out, srq::query_rmp),
        op::MODIFY_RMP => spec!(Initialised, modify_rmp_in, modify_rmp_out, srq::modify_rmp),
        op::ATTACH_TO_MCG => spec!(Initialised, attach_to_mcg_in, attach_to_mcg_out, multicast::attach),
        op::DETACH_FROM_MCG => spec!(Initialised, detach_from_mcg_in, detach_from_mcg_out, multicast::detach),
        op::QUERY_HCA_VPORT_CONTEXT => spec!(Initialised, query_hca_vport_context_in, query_hca_vport_context_out, vport::query_context),
        op::MODIFY_HCA_VPORT_CONTEXT => spec!(Initialised, modify_hca_vport_context_in, modify_hca_vport_context_out, vport::modify_context),
        op::QUERY_HCA_VPORT_GID => spec!(Initialised, query_hca_vport_gid_in, query_hca_vport_gid_out, vport::query_gid),
        op::QUERY_HCA_VPORT_PKEY => spec!(Initialised, query_hca_vport_pkey_in, query_hca_vport_pkey_out, vport::query_pkey),
        op::QUERY_VPORT_STATE => spec!(Initialised, query_vport_state_in, query_vport_state_out, vport::query_state),
        op::QUERY_VPORT_COUNTER => spec!(Initialised, query_vport_counter_in, query_vport_counter_out, statistics::query_vport),
        op::ALLOC_Q_COUNTER => spec!(Initialised, alloc_q_counter_in, alloc_q_counter_out, statistics::alloc),
        op::DEALLOC_Q_COUNTER => spec!(Initialised, dealloc_q_counter_in, dealloc_q_counter_out, statistics::dealloc),
        op::QUERY_Q_COUNTER => spec!(Initialised, query_q_counter_in, query_q_counter_out, statistics::query),
        _ => return None,
    })
}

/// Delivery status of a command, as defined by the mlx5 driver (`cmd.c`; no header has these values).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum DeliveryStatus {
    Ok = 0,
    Token = 2,
    BlockNumber = 3,
    OutputPointer = 4,
    InputPointer = 5,
    Firmware = 6,
    InputLength = 7,
    OutputLength = 8,
    Descriptor = 0x10,
}

/// A command that was not executed, with the delivery status to report.
struct DeliveryError(DeliveryStatus);

impl From<DmaError> for DeliveryError {
    fn from(_: DmaError) -> Self {
        // The adapter can still report this status: the write to the entry is a separate access.
        Self(DeliveryStatus::Firmware)
    }
}

/// A command that was fetched from the driver's memory.
#[derive(Debug)]
pub(super) struct Command {
    /// Index of the entry in the command queue.
    slot: u32,
    address: u64,
    pub(super) input: Vec<u8>,
    pub(super) output_len: usize,
    /// Addresses of the mailboxes for the output after the inline part.
    mailboxes: Vec<u64>,
    /// EQ for command completion events at the time of the fetch.
    command_eqn: Option<u32>,
    /// DMA handle that is valid until the next reset, which also ends the command.
    dma: Dma,
}

/// Fetches the commands whose bits are set in `entries`, as written to the command doorbell. Executes memory key
/// commands at once, and forwards all other commands to the transport worker in order.
pub(super) fn handle_doorbell(adapter: &Adapter, queue: u64, entries: u32) {
    for slot in 0..1_u32 << LOG_COMMAND_ENTRIES {
        if (entries >> slot) & 1 == 0 {
            continue;
        }
        // A command that is fetched without an EQ for commands is polled by the driver, and gets no event.
        let (command_eqn, dma) = {
            let hca = adapter.hca();
            (hca.command_eq(), hca.dma.clone())
        };
        let address = queue.wrapping_add(u64::from(slot) << LOG_COMMAND_STRIDE);
        let mut entry = [0; cmd_layout::BYTES];
        if let Err(error) = dma.read(address, &mut entry) {
            warn!(%error, slot, "command queue entry cannot be read");
            continue;
        }
        match fetch(&dma, &entry) {
            Ok((input, output_len, mailboxes)) => {
                let command = Command {
                    slot,
                    address,
                    input,
                    output_len,
                    mailboxes,
                    command_eqn,
                    dma,
                };
                if is_mkey_command(&command.input) {
                    let output = run_mkey_command(adapter, &command.input, command.output_len);
                    finish(&mut adapter.hca(), &command, &output);
                } else {
                    adapter.inboxes.put(Message::Execute(command));
                }
            }
            Err(DeliveryError(delivery)) => {
                warn!(?delivery, "command cannot be fetched");
                return_ownership(&mut adapter.hca(), (slot, address), &dma, command_eqn, delivery);
            }
        }
    }
}

/// Writes a command's output and returns its entry to the driver.
pub(super) fn finish(hca: &mut Hca, command: &Command, output: &[u8]) {
    let Command {
        slot,
        address,
        mailboxes,
        command_eqn,
        dma,
        ..
    } = command;
    let (inline, rest) = output.split_at(output.len().min(INLINE));
    let mut written = mailboxes.iter().zip(rest.chunks(BLOCK));
    let delivery = match written.try_for_each(|(mailbox, chunk)| dma.write(*mailbox, chunk)) {
        Ok(()) => DeliveryStatus::Ok,
        // The adapter can still report this status: the write to the entry is a separate access.
        Err(_) => DeliveryStatus::Firmware,
    };
    if delivery == DeliveryStatus::Ok {
        if let Err(error) = dma.write(address + cmd_layout::OUT.offset() as u64, inline) {
            warn!(%error, slot, "command queue entry cannot be written");
            return;
        }
    } else {
        warn!(?delivery, "output mailbox cannot be written");
    }
    return_ownership(hca, (*slot, *address), dma, *command_eqn, delivery);
}

/// Writes the delivery status, passes the ownership of the entry to the driver, and posts the command completion event.
fn return_ownership(
    hca: &mut Hca,
    (slot, address): (u32, u64),
    dma: &Dma,
    command_eqn: Option<u32>,
    delivery: DeliveryStatus,
) {
    // The last byte of the entry holds the delivery status and the owner bit.
    let status = [(delivery as u8) << 1];
    if let Err(error) = dma.write(address + u64::from(cmd_layout::STATUS_OWN.offset() / 8), &status) {
        warn!(%error, slot, "command queue entry cannot be written");
        return;
    }
    let now = hca.command_eq();
    if let Some(eqn) = command_eqn.filter(|_| command_eqn == now) {
        hca.post_event(eqn, Eqe::commands(1 << slot));
    }
}

/// Reads the input of a command. Returns the input, the output length, and the addresses of the output mailboxes.
fn fetch(dma: &Dma, entry: &[u8]) -> Result<(Vec<u8>, usize, Vec<u64>), DeliveryError> {
    let bad = |delivery| Err(DeliveryError(delivery));
    if cmd_layout::TYPE.get32(entry) != TRANSPORT {
        return bad(DeliveryStatus::Descriptor);
    }
    let token = cmd_layout::TOKEN.get32(entry);
    let input_len = cmd_layout::INLEN.get(entry) as usize;
    let output_len = cmd_layout::OUTLEN.get(entry) as usize;
    if !(MIN_LENGTH..=MAX_LENGTH).contains(&input_len) {
        return bad(DeliveryStatus::InputLength);
    }
    if !(MIN_LENGTH..=MAX_LENGTH).contains(&output_len) {
        return bad(DeliveryStatus::OutputLength);
    }
    let mut input = cmd_layout::IN.of(entry).to_vec();
    input.resize(input_len, 0);
    let mut next = cmd_layout::IN_PTR.get(entry);
    let mut block = vec![0; cmd_prot_block::BYTES];
    for (number, chunk) in input.get_mut(INLINE..).unwrap_or(&mut []).chunks_mut(BLOCK).enumerate() {
        if next & MAILBOX_ADDRESS == 0 {
            return bad(DeliveryStatus::InputPointer);
        }
        dma.read(next & MAILBOX_ADDRESS, &mut block)?;
        check_block(&block, number, token)?;
        chunk.copy_from_slice(&block[..chunk.len()]);
        next = cmd_prot_block::NEXT.get(&block);
    }
    // Check all output mailboxes before the command is executed.
    let mut mailboxes = Vec::new();
    let mut next = cmd_layout::OUT_PTR.get(entry);
    for number in 0..output_len.saturating_sub(INLINE).div_ceil(BLOCK) {
        if next & MAILBOX_ADDRESS == 0 {
            return bad(DeliveryStatus::OutputPointer);
        }
        dma.read(next & MAILBOX_ADDRESS, &mut block)?;
        check_block(&block, number, token)?;
        mailboxes.push(next & MAILBOX_ADDRESS);
        next = cmd_prot_block::NEXT.get(&block);
    }
    Ok((input, output_len, mailboxes))
}

fn check_block(block: &[u8], number: usize, token: u32) -> Result<(), DeliveryError> {
    if cmd_prot_block::TOKEN.get32(block) != token {
        return Err(DeliveryError(DeliveryStatus::Token));
    }
    if cmd_prot_block::BLOCK_NUM.get(block) != number as u64 {
        return Err(DeliveryError(DeliveryStatus::BlockNumber));
    }
    Ok(())
}

/// Returns the opcode of a command.
fn opcode(input: &[u8]) -> u16 {
    ifc::nop_in::OPCODE.get32(input) as u16
}

/// Returns whether a command is a memory key command.
pub(super) fn is_mkey_command(input: &[u8]) -> bool {
    find(opcode(input)).is_some_and(|spec| matches!(spec.handler, Handler::Mkey(_)))
}

/// Executes a memory key command and returns its output of `output_len` bytes.
pub(super) fn run_mkey_command(adapter: &Adapter, input: &[u8], output_len: usize) -> Vec<u8> {
    let (counters, phase) = {
        let hca = adapter.hca();
        (Arc::clone(&hca.counters), hca.objects.phase)
    };
    respond(
        &counters,
        phase,
        input,
        output_len,
        |handler, input, output| match handler {
            Handler::Mkey(handler) => handler(adapter, input, output),
            Handler::Model(_) => Err(refuse!(MLX5_CMD_STAT_INT_ERR)),
        },
    )
}

/// Executes any other command and returns its output of `output_len` bytes.
pub(super) fn run(model: &mut Model<'_>, input: &[u8], output_len: usize) -> Vec<u8> {
    let (counters, phase) = (Arc::clone(&model.hca.counters), model.hca.objects.phase);
    respond(
        &counters,
        phase,
        input,
        output_len,
        |handler, input, output| match handler {
            Handler::Model(handler) => handler(model, input, output),
            Handler::Mkey(_) => Err(refuse!(MLX5_CMD_STAT_INT_ERR)),
        },
    )
}

fn respond(
    counters: &Counters,
    phase: Phase,
    input: &[u8],
    output_len: usize,
    call: impl FnOnce(Handler, &[u8], &mut [u8]) -> Outcome,
) -> Vec<u8> {
    let opcode = opcode(input);
    let spec = find(opcode);
    let mut output = vec![0; output_len.max(spec.as_ref().map_or(INLINE, |spec| spec.output))];
    counters.command();
    let outcome = match spec {
        None => {
            counters.unknown_command(opcode);
            let name = op::name(opcode).unwrap_or("not in the headers");
            info!(opcode = format_args!("{opcode:#x}"), name, "unknown command");
            Err(refuse!(MLX5_CMD_STAT_BAD_OP_ERR))
        }
        Some(spec) if input.len() < spec.input => Err(refuse!(MLX5_CMD_STAT_BAD_INP_LEN_ERR)),
        Some(spec) if output_len < spec.output => Err(refuse!(MLX5_CMD_STAT_BAD_OUTP_LEN_ERR)),
        Some(spec) if phase < spec.phase => Err(refuse!(MLX5_CMD_STAT_BAD_SYS_STATE_ERR)),
        Some(spec) => call(spec.handler, input, &mut output),
    };
    if let Err(CommandError { status, syndrome }) = outcome {
        counters.refused_command();
        output.fill(0);
        ifc::nop_out::STATUS.set(&mut output, status);
        ifc::nop_out::SYNDROME.set(&mut output, syndrome);
        let name = op::name(opcode).unwrap_or("?");
        debug!(
            name,
            opcode = format_args!("{opcode:#x}"),
            status,
            syndrome = format_args!("{syndrome:#x}"),
            "command refused"
        );
    } else {
        debug!(name = op::name(opcode).unwrap_or("?"), "command executed");
    }
    output.resize(output_len, 0);
    output
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! Commands: how they come from the driver's memory and go back there, and who carries them out.
//!
//! A command is an entry of the command queue with 16 bytes of input and output in it, and chains of mailboxes with the
//! rest. What of it cannot be read or written is answered with a delivery status; what of it makes no sense, with a
//! status in the output. Nothing is changed by a command that is refused.

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
use super::eq::Entry;
use super::inbox::Message;
use super::layout::wire::{cmd_layout, cmd_prot_block};
use super::layout::{constants, ifc, op};
use super::model::{Hca, Model};
use super::registers::{LOG_COMMAND_ENTRIES, LOG_COMMAND_STRIDE};

/// The only kind of entry there is.
const TRANSPORT: u32 = constants::MLX5_PCI_CMD_XPORT;
/// Bytes of data in a mailbox.
const BLOCK: usize = constants::MLX5_CMD_DATA_BLOCK_SIZE as usize;
/// Bytes of input and of output that are in the entry itself.
const INLINE: usize = 16;
/// Shortest input and output: an opcode and its modifier, a status and a syndrome.
const MIN_LENGTH: usize = 8;
/// Longest input or output taken. The longest commands register memory: 8 bytes a page.
const MAX_LENGTH: usize = 16 << 20;
/// Addresses of mailboxes have low bits that are no address.
const MAILBOX: u64 = !0x3ff;

/// What a command is refused with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    status: u32,
    /// Says which check it was; the driver prints it.
    syndrome: u32,
}

/// Makes refusals. The syndromes are this model's own: the source line of the check.
macro_rules! refuse {
    ($status:ident) => {
        $crate::command::Refusal::new($crate::layout::constants::$status, line!())
    };
}
pub(super) use refuse;
pub(super) use srq::Kind as SrqKind;
pub(super) use statistics::{CounterSet, since as link_since};
pub(super) use vport::capability as port_capability;

impl Refusal {
    pub(super) const fn new(status: u32, line: u32) -> Self {
        Self {
            status,
            syndrome: 0x00d0_0000 | line,
        }
    }
}

/// A command's end.
pub(super) type Outcome = Result<(), Refusal>;

/// Carries a command out: input as long as its structure at least, output as well.
#[derive(Clone, Copy)]
enum Handler {
    /// With all of the adapter, on the transport's worker.
    Model(fn(&mut Model<'_>, &[u8], &mut [u8]) -> Outcome),
    /// A command about memory keys, while payload may be moved by them.
    Keys(fn(&Adapter, &[u8], &mut [u8]) -> Outcome),
}

/// When a command may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// Always.
    Any,
    /// After ENABLE_HCA.
    Enabled,
    /// After INIT_HCA.
    Initialised,
}

/// A command that the model implements.
struct CommandInfo {
    phase: Phase,
    input: usize,
    output: usize,
    handler: Handler,
}

/// Names a command's handler and its structures.
macro_rules! command {
    ($phase:ident, $input:ident, $output:ident, $handler:expr) => {
        command!($phase, $input, $output, Model $handler)
    };
    ($phase:ident, $input:ident, $output:ident, $kind:ident $handler:expr) => {
        CommandInfo {
            phase: Phase::$phase,
            input: ifc::$input::BYTES,
            output: ifc::$output::BYTES,
            handler: Handler::$kind($handler),
        }
    };
}

/// Returns the command of an opcode.
#[rustfmt::skip]
fn find(opcode: u16) -> Option<CommandInfo> {
    Some(match opcode {
        op::ENABLE_HCA => command!(Any, enable_hca_in, enable_hca_out, hca::enable),
        op::DISABLE_HCA => command!(Any, disable_hca_in, disable_hca_out, hca::disable),
        op::QUERY_ISSI => command!(Any, query_issi_in, query_issi_out, hca::query_issi),
        op::SET_ISSI => command!(Any, set_issi_in, set_issi_out, hca::set_issi),
        op::QUERY_PAGES => command!(Enabled, query_pages_in, query_pages_out, hca::query_pages),
        op::MANAGE_PAGES => command!(Enabled, manage_pages_in, manage_pages_out, hca::manage_pages),
        op::QUERY_HCA_CAP => command!(Enabled, query_hca_cap_in, query_hca_cap_out, hca::query_cap),
        op::SET_HCA_CAP => command!(Enabled, set_hca_cap_in, set_hca_cap_out, hca::set_cap),
        op::INIT_HCA => command!(Enabled, init_hca_in, init_hca_out, hca::init),
        op::TEARDOWN_HCA => command!(Enabled, teardown_hca_in, teardown_hca_out, hca::teardown),
        op::QUERY_ADAPTER => command!(Enabled, query_adapter_in, query_adapter_out, hca::query_adapter),
        op::SET_DRIVER_VERSION => command!(Enabled, set_driver_version_in, set_driver_version_out, hca::set_driver_version),
        op::NOP => command!(Any, nop_in, nop_out, hca::nop),
        op::QUERY_SPECIAL_CONTEXTS => command!(Initialised, query_special_contexts_in, query_special_contexts_out, hca::special_contexts),
        op::ACCESS_REG => command!(Enabled, access_register_in, access_register_out, register::access),
        op::ALLOC_UAR => command!(Initialised, alloc_uar_in, alloc_uar_out, objects::alloc_uar),
        op::DEALLOC_UAR => command!(Initialised, dealloc_uar_in, dealloc_uar_out, objects::dealloc_uar),
        op::ALLOC_PD => command!(Initialised, alloc_pd_in, alloc_pd_out, objects::alloc_pd),
        op::DEALLOC_PD => command!(Initialised, dealloc_pd_in, dealloc_pd_out, objects::dealloc_pd),
        op::ALLOC_XRCD => command!(Initialised, alloc_xrcd_in, alloc_xrcd_out, objects::alloc_xrcd),
        op::DEALLOC_XRCD => command!(Initialised, dealloc_xrcd_in, dealloc_xrcd_out, objects::dealloc_xrcd),
        op::ALLOC_TRANSPORT_DOMAIN => command!(Initialised, alloc_transport_domain_in, alloc_transport_domain_out, objects::alloc_transport_domain),
        op::DEALLOC_TRANSPORT_DOMAIN => command!(Initialised, dealloc_transport_domain_in, dealloc_transport_domain_out, objects::dealloc_transport_domain),
        op::CREATE_EQ => command!(Initialised, create_eq_in, create_eq_out, eq::create),
        op::DESTROY_EQ => command!(Initialised, destroy_eq_in, destroy_eq_out, eq::destroy),
        op::QUERY_EQ => command!(Initialised, query_eq_in, query_eq_out, eq::query),
        op::CREATE_CQ => command!(Initialised, create_cq_in, create_cq_out, cq::create),
        op::DESTROY_CQ => command!(Initialised, destroy_cq_in, destroy_cq_out, cq::destroy),
        op::QUERY_CQ => command!(Initialised, query_cq_in, query_cq_out, cq::query),
        op::MODIFY_CQ => command!(Initialised, modify_cq_in, modify_cq_out, cq::modify),
        op::CREATE_MKEY => command!(Initialised, create_mkey_in, create_mkey_out, Keys mkey::create),
        op::DESTROY_MKEY => command!(Initialised, destroy_mkey_in, destroy_mkey_out, Keys mkey::destroy),
        op::QUERY_MKEY => command!(Initialised, query_mkey_in, query_mkey_out, Keys mkey::query),
        op::PAGE_FAULT_RESUME => command!(Initialised, page_fault_resume_in, page_fault_resume_out, mkey::page_fault_resume),
        op::CREATE_QP => command!(Initialised, create_qp_in, create_qp_out, qp::create),
        op::DESTROY_QP => command!(Initialised, destroy_qp_in, destroy_qp_out, qp::destroy),
        op::QUERY_QP => command!(Initialised, query_qp_in, query_qp_out, qp::query),
        op::RST2INIT_QP => command!(Initialised, rst2init_qp_in, rst2init_qp_out, qp::modify),
        op::INIT2INIT_QP => command!(Initialised, init2init_qp_in, init2init_qp_out, qp::modify),
        op::INIT2RTR_QP => command!(Initialised, init2rtr_qp_in, init2rtr_qp_out, qp::modify),
        op::RTR2RTS_QP => command!(Initialised, rtr2rts_qp_in, rtr2rts_qp_out, qp::modify),
        op::RTS2RTS_QP => command!(Initialised, rts2rts_qp_in, rts2rts_qp_out, qp::modify),
        op::SQERR2RTS_QP => command!(Initialised, sqerr2rts_qp_in, sqerr2rts_qp_out, qp::modify),
        op::SQD_RTS_QP => command!(Initialised, sqd2rts_qp_in, sqd2rts_qp_out, qp::modify),
        op::_2ERR_QP => command!(Initialised, qp_2err_in, qp_2err_out, qp::end),
        op::_2RST_QP => command!(Initialised, qp_2rst_in, qp_2rst_out, qp::end),
        op::CREATE_SRQ => command!(Initialised, create_srq_in, create_srq_out, srq::create),
        op::DESTROY_SRQ => command!(Initialised, destroy_srq_in, destroy_srq_out, srq::destroy),
        op::QUERY_SRQ => command!(Initialised, query_srq_in, query_srq_out, srq::query),
        op::ARM_RQ => command!(Initialised, arm_rq_in, arm_rq_out, srq::arm),
        op::CREATE_XRC_SRQ => command!(Initialised, create_xrc_srq_in, create_xrc_srq_out, srq::create_xrc),
        op::DESTROY_XRC_SRQ => command!(Initialised, destroy_xrc_srq_in, destroy_xrc_srq_out, srq::destroy_xrc),
        op::QUERY_XRC_SRQ => command!(Initialised, query_xrc_srq_in, query_xrc_srq_out, srq::query_xrc),
        op::ARM_XRC_SRQ => command!(Initialised, arm_xrc_srq_in, arm_xrc_srq_out, srq::arm_xrc),
        op::CREATE_RMP => command!(Initialised, create_rmp_in, create_rmp_out, srq::create_rmp),
        op::DESTROY_RMP => command!(Initialised, destroy_rmp_in, destroy_rmp_out, srq::destroy_rmp),
        op::QUERY_RMP => command!(Initialised, query_rmp_in, query_rmp_out, srq::query_rmp),
        op::MODIFY_RMP => command!(Initialised, modify_rmp_in, modify_rmp_out, srq::modify_rmp),
        op::ATTACH_TO_MCG => command!(Initialised, attach_to_mcg_in, attach_to_mcg_out, multicast::attach),
        op::DETACH_FROM_MCG => command!(Initialised, detach_from_mcg_in, detach_from_mcg_out, multicast::detach),
        op::QUERY_HCA_VPORT_CONTEXT => command!(Initialised, query_hca_vport_context_in, query_hca_vport_context_out, vport::query_context),
        op::MODIFY_HCA_VPORT_CONTEXT => command!(Initialised, modify_hca_vport_context_in, modify_hca_vport_context_out, vport::modify_context),
        op::QUERY_HCA_VPORT_GID => command!(Initialised, query_hca_vport_gid_in, query_hca_vport_gid_out, vport::query_gid),
        op::QUERY_HCA_VPORT_PKEY => command!(Initialised, query_hca_vport_pkey_in, query_hca_vport_pkey_out, vport::query_pkey),
        op::QUERY_VPORT_STATE => command!(Initialised, query_vport_state_in, query_vport_state_out, vport::query_state),
        op::QUERY_VPORT_COUNTER => command!(Initialised, query_vport_counter_in, query_vport_counter_out, statistics::query_vport),
        op::ALLOC_Q_COUNTER => command!(Initialised, alloc_q_counter_in, alloc_q_counter_out, statistics::alloc),
        op::DEALLOC_Q_COUNTER => command!(Initialised, dealloc_q_counter_in, dealloc_q_counter_out, statistics::dealloc),
        op::QUERY_Q_COUNTER => command!(Initialised, query_q_counter_in, query_q_counter_out, statistics::query),
        _ => return None,
    })
}

/// Why a command could not be taken or answered; the driver knows these numbers, but no header has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Delivery {
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

/// What ended a command before it was carried out.
struct Lost(Delivery);

impl From<DmaError> for Lost {
    fn from(_: DmaError) -> Self {
        // Only the entry itself is needed to say that something else cannot be reached.
        Self(Delivery::Firmware)
    }
}

/// A command that was read from the driver's memory.
#[derive(Debug)]
pub(super) struct Taken {
    /// Its entry in the command queue.
    slot: u32,
    address: u64,
    pub(super) input: Vec<u8>,
    pub(super) output_len: usize,
    /// Where the output goes beyond the entry.
    mailboxes: Vec<u64>,
    /// The event queue for commands when it was read.
    told: Option<u32>,
    /// Access to the bus that ends with the next reset, as the command does.
    dma: Dma,
}

/// Reads the commands whose bits are set in `entries`. Those about memory keys are carried out here and now; the others
/// are handed on to the transport's worker, in order.
pub(super) fn execute(adapter: &Adapter, queue: u64, entries: u32) {
    for slot in 0..1_u32 << LOG_COMMAND_ENTRIES {
        if (entries >> slot) & 1 == 0 {
            continue;
        }
        // An event for a command that was begun while there was no queue for it would find nobody.
        let (told, dma) = {
            let hca = adapter.hca();
            (hca.command_eq(), hca.dma.clone())
        };
        let address = queue.wrapping_add(u64::from(slot) << LOG_COMMAND_STRIDE);
        let mut entry = [0; cmd_layout::BYTES];
        if let Err(error) = dma.read(address, &mut entry) {
            warn!(%error, slot, "a command cannot be read");
            continue;
        }
        match take(&dma, &entry) {
            Ok((input, output_len, mailboxes)) => {
                let command = Taken {
                    slot,
                    address,
                    input,
                    output_len,
                    mailboxes,
                    told,
                    dma,
                };
                if is_about_keys(&command.input) {
                    let output = run_about_keys(adapter, &command.input, command.output_len);
                    finish(&mut adapter.hca(), &command, &output);
                } else {
                    adapter.inboxes.put(Message::Execute(command));
                }
            }
            Err(Lost(delivery)) => {
                warn!(?delivery, "a command is not taken");
                give_back(&mut adapter.hca(), (slot, address), &dma, told, delivery);
            }
        }
    }
}

/// Writes a command's output, and ends the command.
pub(super) fn finish(hca: &mut Hca, command: &Taken, output: &[u8]) {
    let Taken {
        slot,
        address,
        mailboxes,
        told,
        dma,
        ..
    } = command;
    let (inline, rest) = output.split_at(output.len().min(INLINE));
    let mut written = mailboxes.iter().zip(rest.chunks(BLOCK));
    let delivery = match written.try_for_each(|(mailbox, chunk)| dma.write(*mailbox, chunk)) {
        Ok(()) => Delivery::Ok,
        // Only the entry itself is needed to say that something else cannot be reached.
        Err(_) => Delivery::Firmware,
    };
    if delivery == Delivery::Ok {
        if let Err(error) = dma.write(address + cmd_layout::OUT.offset() as u64, inline) {
            warn!(%error, slot, "a command cannot be answered");
            return;
        }
    } else {
        warn!(?delivery, "a command's output cannot be written");
    }
    give_back(hca, (*slot, *address), dma, *told, delivery);
}

/// Returns a command queue entry to the driver, and signals the completion.
fn give_back(hca: &mut Hca, (slot, address): (u32, u64), dma: &Dma, eq: Option<u32>, delivery: Delivery) {
    // The last byte of the entry has the status and the ownership bit.
    let status = [(delivery as u8) << 1];
    if let Err(error) = dma.write(address + u64::from(cmd_layout::STATUS_OWN.offset() / 8), &status) {
        warn!(%error, slot, "a command cannot be answered");
        return;
    }
    let now = hca.command_eq();
    if let Some(eqn) = eq.filter(|_| eq == now) {
        hca.post_event(eqn, Entry::commands(1 << slot));
    }
}

/// Reads what belongs to an entry: the command's input, the length of its output, and where that goes.
fn take(dma: &Dma, entry: &[u8]) -> Result<(Vec<u8>, usize, Vec<u64>), Lost> {
    let bad = |delivery| Err(Lost(delivery));
    if cmd_layout::TYPE.get32(entry) != TRANSPORT {
        return bad(Delivery::Descriptor);
    }
    let token = cmd_layout::TOKEN.get32(entry);
    let input_len = cmd_layout::INLEN.get(entry) as usize;
    let output_len = cmd_layout::OUTLEN.get(entry) as usize;
    if !(MIN_LENGTH..=MAX_LENGTH).contains(&input_len) {
        return bad(Delivery::InputLength);
    }
    if !(MIN_LENGTH..=MAX_LENGTH).contains(&output_len) {
        return bad(Delivery::OutputLength);
    }
    let mut input = cmd_layout::IN.of(entry).to_vec();
    input.resize(input_len, 0);
    let mut next = cmd_layout::IN_PTR.get(entry);
    let mut block = vec![0; cmd_prot_block::BYTES];
    for (number, chunk) in input.get_mut(INLINE..).unwrap_or(&mut []).chunks_mut(BLOCK).enumerate() {
        if next & MAILBOX == 0 {
            return bad(Delivery::InputPointer);
        }
        dma.read(next & MAILBOX, &mut block)?;
        check_block(&block, number, token)?;
        chunk.copy_from_slice(&block[..chunk.len()]);
        next = cmd_prot_block::NEXT.get(&block);
    }
    // All of the output's mailboxes are looked at before anything is done.
    let mut mailboxes = Vec::new();
    let mut next = cmd_layout::OUT_PTR.get(entry);
    for number in 0..output_len.saturating_sub(INLINE).div_ceil(BLOCK) {
        if next & MAILBOX == 0 {
            return bad(Delivery::OutputPointer);
        }
        dma.read(next & MAILBOX, &mut block)?;
        check_block(&block, number, token)?;
        mailboxes.push(next & MAILBOX);
        next = cmd_prot_block::NEXT.get(&block);
    }
    Ok((input, output_len, mailboxes))
}

fn check_block(block: &[u8], number: usize, token: u32) -> Result<(), Lost> {
    if cmd_prot_block::TOKEN.get32(block) != token {
        return Err(Lost(Delivery::Token));
    }
    if cmd_prot_block::BLOCK_NUM.get(block) != number as u64 {
        return Err(Lost(Delivery::BlockNumber));
    }
    Ok(())
}

/// The command that an input is about.
fn opcode(input: &[u8]) -> u16 {
    ifc::nop_in::OPCODE.get32(input) as u16
}

/// Whether a command is carried out while payload may be moved.
pub(super) fn is_about_keys(input: &[u8]) -> bool {
    find(opcode(input)).is_some_and(|known| matches!(known.handler, Handler::Keys(_)))
}

/// Carries out a command about memory keys, and returns its output of `output_len` bytes.
pub(super) fn run_about_keys(adapter: &Adapter, input: &[u8], output_len: usize) -> Vec<u8> {
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
            Handler::Keys(handler) => handler(adapter, input, output),
            Handler::Model(_) => Err(refuse!(MLX5_CMD_STAT_INT_ERR)),
        },
    )
}

/// Carries out any other command, and returns its output of `output_len` bytes.
pub(super) fn run(model: &mut Model<'_>, input: &[u8], output_len: usize) -> Vec<u8> {
    let (counters, phase) = (Arc::clone(&model.hca.counters), model.hca.objects.phase);
    respond(
        &counters,
        phase,
        input,
        output_len,
        |handler, input, output| match handler {
            Handler::Model(handler) => handler(model, input, output),
            Handler::Keys(_) => Err(refuse!(MLX5_CMD_STAT_INT_ERR)),
        },
    )
}

fn respond(
    counters: &Counters,
    phase: Phase,
    input: &[u8],
    output_len: usize,
    carry_out: impl FnOnce(Handler, &[u8], &mut [u8]) -> Outcome,
) -> Vec<u8> {
    let opcode = opcode(input);
    let known = find(opcode);
    let mut output = vec![0; output_len.max(known.as_ref().map_or(INLINE, |known| known.output))];
    counters.command();
    let outcome = match known {
        None => {
            counters.unknown_command(opcode);
            let name = op::name(opcode).unwrap_or("nothing that the headers know");
            info!(opcode = format_args!("{opcode:#x}"), name, "unknown command");
            Err(refuse!(MLX5_CMD_STAT_BAD_OP_ERR))
        }
        Some(known) if input.len() < known.input => Err(refuse!(MLX5_CMD_STAT_BAD_INP_LEN_ERR)),
        Some(known) if output_len < known.output => Err(refuse!(MLX5_CMD_STAT_BAD_OUTP_LEN_ERR)),
        Some(known) if phase < known.phase => Err(refuse!(MLX5_CMD_STAT_BAD_SYS_STATE_ERR)),
        Some(known) => carry_out(known.handler, input, &mut output),
    };
    if let Err(Refusal { status, syndrome }) = outcome {
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
            "refused"
        );
    } else {
        debug!(name = op::name(opcode).unwrap_or("?"), "command");
    }
    output.resize(output_len, 0);
    output
}

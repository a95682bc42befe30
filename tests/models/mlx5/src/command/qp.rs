// SPDX-License-Identifier: MIT OR Apache-2.0

//! Queue pair commands.

use p2pmem_ib::{AccessFlags, Engine, Gid, Grh, Modify, ModifyError, Mtu, Path, QpConfig, ReceiveFrom, Service, State};

use super::srq::LOG_MIN_STRIDE;
use super::{CommandError, Outcome, refuse};
use crate::caps::limit;
use crate::layout::{constants, ifc::*, op};
use crate::model::{Hca, Model};
use crate::qp::Qp;
use crate::ring::{DoorbellRecord, Pages, Ring};

/// Logarithm of the size of a send WQE basic block in bytes.
const LOG_WQEBB: u32 = constants::MLX5_SEND_WQE_BB.ilog2();
/// Logarithm of the maximum receive WQE stride in bytes.
const LOG_MAX_RECEIVE: u32 = limit::RECEIVE_ENTRY.ilog2();

fn service(context: &[u8]) -> Result<Service, CommandError> {
    Ok(match qpc::ST.get32(context) {
        // A REG_UMR QP sends no packets and otherwise behaves like an RC QP.
        constants::MLX5_QP_ST_RC | constants::MLX5_QP_ST_REG_UMR => Service::Rc,
        constants::MLX5_QP_ST_UC => Service::Uc,
        // Drivers create QP 0. No packet reaches it, because the subnet has no subnet management packets.
        constants::MLX5_QP_ST_UD | constants::MLX5_QP_ST_QP0 => Service::Ud,
        constants::MLX5_QP_ST_XRC => Service::Xrc,
        constants::MLX5_QP_ST_QP1 => Service::Gsi,
        _ => return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR)),
    })
}

pub(super) fn create(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let context = create_qp_in::QPC.of(input);
    let refused = create_qp_in::WQ_UMEM_VALID.is_set(input)
        || create_qp_in::INPUT_QPN.is_set(input)
        || qpc::WQ_SIGNATURE.is_set(context)
        || qpc::OFFLOAD_TYPE.is_set(context)
        || qpc::ULP_STATELESS_OFFLOAD_MODE.is_set(context)
        || qpc::CD_MASTER.is_set(context)
        || qpc::CD_SLAVE_SEND.is_set(context)
        || qpc::CD_SLAVE_RECEIVE.is_set(context);
    if refused {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    let service = service(context)?;
    let xrc = service == Service::Xrc;
    let rq_type = qpc::RQ_TYPE.get32(context);
    let own = rq_type == constants::MLX5_NON_ZERO_RQ && !xrc;
    let log_receives = qpc::LOG_RQ_SIZE.get32(context);
    let log_stride = qpc::LOG_RQ_STRIDE.get32(context) + LOG_MIN_STRIDE;
    let log_sends = qpc::LOG_SQ_SIZE.get32(context);
    let sends = !qpc::NO_SQ.is_set(context);
    if log_receives > limit::LOG_QP_SIZE || log_sends > limit::LOG_QP_SIZE || own && log_stride > LOG_MAX_RECEIVE {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    let pd = qpc::PD.get32(context);
    let uar = qpc::UAR_PAGE.get32(context);
    let (send_cqn, receive_cqn) = (qpc::CQN_SND.get32(context), qpc::CQN_RCV.get32(context));
    let hca = &*model.hca;
    let exists = |cqn| hca.objects.cqs.get(cqn).is_some();
    // An XRC target QP has no send queue, no receive queue and no UAR.
    let complete = (exists(send_cqn) || !sends) && (exists(receive_cqn) || !own);
    let reg_umr = qpc::ST.get32(context) == constants::MLX5_QP_ST_REG_UMR;
    let domain = reg_umr || hca.objects.pds.get(pd).is_some();
    if !domain || sends && hca.objects.uars.get(uar).is_none() || !complete {
        return Err(refuse!(MLX5_CMD_STAT_BAD_RES_ERR));
    }
    let receive = match rq_type {
        _ if xrc => ReceiveFrom::None,
        constants::MLX5_NON_ZERO_RQ => ReceiveFrom::Own,
        constants::MLX5_SRQ_RQ => {
            let srqn = qpc::SRQN_RMPN_XRQN.get32(context);
            hca.objects.srqs.get(srqn).ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))?;
            ReceiveFrom::Shared(srqn)
        }
        constants::MLX5_ZERO_LEN_RQ => ReceiveFrom::None,
        _ => return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR)),
    };
    let xrcd = xrc.then(|| qpc::XRCD.get32(context));
    if xrcd.is_some_and(|xrcd| hca.objects.xrcds.get(xrcd).is_none()) {
        return Err(refuse!(MLX5_CMD_STAT_BAD_RES_ERR));
    }
    // Buffer layout: the receive queue, then the send queue.
    let receive_bytes = if own { 1_u64 << (log_receives + log_stride) } else { 0 };
    let send_bytes = if sends { 1_u64 << (log_sends + LOG_WQEBB) } else { 0 };
    let pages = || {
        let list = create_qp_in::PAS.of(input);
        let (log_page_size, offset) = (qpc::LOG_PAGE_SIZE.get32(context), qpc::PAGE_OFFSET.get32(context));
        Pages::new(list, log_page_size, offset, receive_bytes + send_bytes)
    };
    let ring = |wanted: bool, base, log_entries, log_stride| {
        if !wanted {
            return Ok(None);
        }
        let ring = pages().and_then(|pages| Ring::new(pages, base, log_entries, log_stride));
        ring.map(Some).ok_or(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR))
    };
    let mut qp = Qp::new(
        ring(sends, receive_bytes, log_sends, LOG_WQEBB)?,
        ring(own, 0, log_receives, log_stride)?,
        DoorbellRecord(qpc::DBR_ADDR.get(context)),
        context.to_vec(),
    );
    let deth = qpc::DETH_SQPN.get32(context);
    let config = QpConfig {
        service,
        pd,
        send_cqn,
        receive_cqn,
        receive,
        xrcd: xrcd.unwrap_or(0),
        source_qpn: (deth != 0).then_some(deth),
        deaf_to_itself: qpc::BLOCK_LB_MC.is_set(context),
    };
    qp.service = service;
    qp.reg_umr = reg_umr;
    qp.pd = pd;
    qp.uar = uar;
    qp.xrcd = xrcd;
    qp.send_cqn = send_cqn;
    qp.receive_cqn = receive_cqn;
    qpc::STATE.set(&mut qp.context, constants::MLX5_QPC_STATE_RST);
    let qpn = model.hca.objects.qps.add(qp).ok_or(refuse!(MLX5_CMD_STAT_NO_RES_ERR))?;
    if let Err(error) = engine(model, reg_umr).0.create_qp(qpn, config) {
        model.hca.objects.qps.remove(qpn);
        return Err(modify_error(&error));
    }
    if reg_umr {
        model.inboxes.set_umr_qp(qpn, true);
    }
    create_qp_out::QPN.set(output, qpn);
    Ok(())
}

/// Returns the transport engine of a QP, and the host of the engine.
fn engine<'m>(model: &'m mut Model<'_>, reg_umr: bool) -> (&'m mut Engine, &'m mut Hca) {
    let engine = if reg_umr {
        &mut *model.umr_engine
    } else {
        &mut *model.engine
    };
    (engine, &mut *model.hca)
}

/// Returns whether a QP has the service type REG_UMR.
fn is_reg_umr(model: &Model<'_>, qpn: u32) -> Result<bool, CommandError> {
    let qp = model.hca.objects.qps.get(qpn);
    qp.map(|qp| qp.reg_umr).ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))
}

fn modify_error(error: &ModifyError) -> CommandError {
    match error {
        ModifyError::NoQueue => refuse!(MLX5_CMD_STAT_BAD_RES_ERR),
        ModifyError::InUse => refuse!(MLX5_CMD_STAT_RES_BUSY),
        ModifyError::Transition { .. } => refuse!(MLX5_CMD_STAT_BAD_QP_STATE_ERR),
        ModifyError::Range(_) => refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR),
        ModifyError::Busy => refuse!(MLX5_CMD_STAT_RES_BUSY),
    }
}

pub(super) fn destroy(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let qpn = destroy_qp_in::QPN.get32(input);
    let reg_umr = is_reg_umr(model, qpn)?;
    let (engine, _) = engine(model, reg_umr);
    engine.destroy_qp(qpn).map_err(|error| modify_error(&error))?;
    model.hca.objects.qps.remove(qpn);
    model.inboxes.set_umr_qp(qpn, false);
    Ok(())
}

/// Executes 2ERR_QP and 2RST_QP.
pub(super) fn to_error_or_reset(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let qpn = qp_2err_in::QPN.get32(input);
    let reset = qp_2err_in::OPCODE.get32(input) == u32::from(op::_2RST_QP);
    let reg_umr = is_reg_umr(model, qpn)?;
    let change = Modify {
        state: Some(if reset { State::Reset } else { State::Err }),
        ..Modify::default()
    };
    let (engine, hca) = engine(model, reg_umr);
    engine.modify(hca, qpn, &change).map_err(|error| modify_error(&error))?;
    if let Some(qp) = model.hca.objects.qps.get_mut(qpn).filter(|_| reset) {
        qp.reset();
    }
    Ok(())
}

/// Decodes the primary address path. The transport checks the ranges.
fn path(context: &[u8]) -> Path {
    let vector = qpc::PRIMARY_ADDRESS_PATH.of(context);
    let grh = ads::GRH.is_set(vector).then(|| {
        let mut dgid = Gid::default();
        dgid.0.copy_from_slice(ads::RGID_RIP.of(vector));
        Grh {
            sgid_index: ads::SRC_ADDR_INDEX.get32(vector) as u16,
            dgid,
            flow_label: ads::FLOW_LABEL.get32(vector),
            traffic_class: ads::TCLASS.get32(vector) as u8,
            hop_limit: ads::HOP_LIMIT.get32(vector) as u8,
        }
    });
    Path {
        dlid: ads::RLID.get32(vector) as u16,
        path_bits: ads::MLID.get32(vector) as u8,
        sl: ads::SL.get32(vector) as u8,
        grh,
    }
}

fn access(context: &[u8]) -> AccessFlags {
    AccessFlags {
        write: qpc::RWE.is_set(context),
        read: qpc::RRE.is_set(context),
        atomic: qpc::RAE.is_set(context),
    }
}

/// Returns the attributes that a transition changes: the required ones, and those in the optional parameter mask.
#[allow(clippy::too_many_lines)]
fn change(opcode: u16, context: &[u8], options: u32) -> Result<Modify, CommandError> {
    let vector = qpc::PRIMARY_ADDRESS_PATH.of(context);
    let mut change = Modify::default();
    let option = |bit: u32| options & bit != 0;
    let connect = opcode == op::INIT2RTR_QP;
    let send = opcode == op::RTR2RTS_QP;
    let begin = opcode == op::RST2INIT_QP;
    change.state = match opcode {
        op::RST2INIT_QP | op::INIT2INIT_QP => Some(State::Init),
        op::INIT2RTR_QP => Some(State::Rtr),
        op::RTR2RTS_QP | op::SQERR2RTS_QP | op::SQD_RTS_QP => Some(State::Rts),
        _ => None,
    };
    if begin || option(constants::MLX5_QP_OPTPAR_RRE | constants::MLX5_QP_OPTPAR_RWE | constants::MLX5_QP_OPTPAR_RAE) {
        change.access = Some(access(context));
    }
    if begin || option(constants::MLX5_QP_OPTPAR_PKEY_INDEX) {
        // Not truncated: the field has 16 bits.
        change.pkey_index = Some(ads::PKEY_INDEX.get32(vector) as u16);
    }
    if begin || option(constants::MLX5_QP_OPTPAR_Q_KEY) {
        change.qkey = Some(qpc::Q_KEY.get32(context));
    }
    if connect {
        let code = qpc::MTU.get32(context) as u8;
        let mtu = Mtu::from_code(code);
        change.mtu = Some(mtu.ok_or_else(|| refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR))?);
        change.receive_psn = Some(qpc::NEXT_RCV_PSN.get32(context));
        change.remote_qpn = Some(qpc::REMOTE_QPN.get32(context));
    }
    if connect || option(constants::MLX5_QP_OPTPAR_PRIMARY_ADDR_PATH) {
        change.path = Some(path(context));
    }
    if connect || option(constants::MLX5_QP_OPTPAR_RNR_TIMEOUT) {
        change.min_rnr_timer = Some(qpc::MIN_RNR_NAK.get32(context) as u8);
    }
    if connect || option(constants::MLX5_QP_OPTPAR_RRA_MAX) {
        change.max_served = Some(reads(qpc::LOG_RRA_MAX.get32(context))?);
    }
    if send {
        change.send_psn = Some(qpc::NEXT_SEND_PSN.get32(context));
    }
    if send || option(constants::MLX5_QP_OPTPAR_RETRY_COUNT) {
        change.retry_count = Some(qpc::RETRY_COUNT.get32(context) as u8);
    }
    if send || option(constants::MLX5_QP_OPTPAR_RNR_RETRY) {
        change.rnr_retry = Some(qpc::RNR_RETRY.get32(context) as u8);
    }
    if send || option(constants::MLX5_QP_OPTPAR_ACK_TIMEOUT) {
        change.ack_timeout = Some(ads::ACK_TIMEOUT.get32(vector) as u8);
    }
    if send || option(constants::MLX5_QP_OPTPAR_SRA_MAX) {
        change.max_initiated = Some(reads(qpc::LOG_SRA_MAX.get32(context))?);
    }
    Ok(change)
}

/// Converts the logarithm of a number of outstanding READs and atomics. Fails above the limit.
fn reads(log: u32) -> Result<u8, CommandError> {
    if log > limit::LOG_READS {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    Ok(1 << log)
}

/// Executes all transitions except those of [`to_error_or_reset`]; their inputs have the same layout.
pub(super) fn modify(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let opcode = rst2init_qp_in::OPCODE.get32(input) as u16;
    let qpn = rst2init_qp_in::QPN.get32(input);
    let options = rst2init_qp_in::OPT_PARAM_MASK.get32(input);
    let context = rst2init_qp_in::QPC.of(input);
    let reg_umr = is_reg_umr(model, qpn)?;
    let Some(state) = engine(model, reg_umr).0.query(qpn).map(|view| view.state) else {
        return Err(refuse!(MLX5_CMD_STAT_BAD_RES_ERR));
    };
    // Each opcode requires one current state.
    let from = match opcode {
        op::RST2INIT_QP => State::Reset,
        op::INIT2INIT_QP | op::INIT2RTR_QP => State::Init,
        op::RTR2RTS_QP => State::Rtr,
        op::RTS2RTS_QP => State::Rts,
        op::SQERR2RTS_QP => State::Sqe,
        _ => State::Sqd,
    };
    if state != from {
        return Err(refuse!(MLX5_CMD_STAT_BAD_QP_STATE_ERR));
    }
    let change = change(opcode, context, options)?;
    let (engine, hca) = engine(model, reg_umr);
    engine.modify(hca, qpn, &change).map_err(|error| modify_error(&error))?;
    if let Some(qp) = model.hca.objects.qps.get_mut(qpn) {
        save_context_fields(&mut qp.context, context, &change, options);
    }
    Ok(())
}

/// Copies the attributes that QUERY_QP returns and the transport does not keep.
fn save_context_fields(context: &mut [u8], new: &[u8], change: &Modify, options: u32) {
    let mut copy = |taken: bool, fields: &[crate::layout::Field]| {
        for field in fields.iter().filter(|_| taken) {
            field.set(context, field.get(new));
        }
    };
    let path = qpc::PRIMARY_ADDRESS_PATH;
    copy(change.min_rnr_timer.is_some(), &[qpc::MIN_RNR_NAK]);
    copy(change.max_served.is_some(), &[qpc::LOG_RRA_MAX]);
    copy(change.retry_count.is_some(), &[qpc::RETRY_COUNT]);
    copy(change.rnr_retry.is_some(), &[qpc::RNR_RETRY]);
    copy(change.max_initiated.is_some(), &[qpc::LOG_SRA_MAX]);
    copy(change.ack_timeout.is_some(), &[path.field(ads::ACK_TIMEOUT)]);
    copy(change.pkey_index.is_some(), &[path.field(ads::PKEY_INDEX)]);
    copy(
        change.state == Some(State::Init) || options & constants::MLX5_QP_OPTPAR_PRI_PORT != 0,
        &[path.field(ads::VHCA_PORT_NUM)],
    );
    copy(
        options & constants::MLX5_QP_OPTPAR_COUNTER_SET_ID != 0 || change.state == Some(State::Init),
        &[qpc::COUNTER_SET_ID],
    );
    copy(change.path.is_some(), &[path.field(ads::STAT_RATE)]);
    copy(change.mtu.is_some(), &[qpc::LOG_MSG_MAX]);
    copy(change.state.is_some(), &[qpc::PM_STATE]);
}

pub(super) fn query(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    let qpn = query_qp_in::QPN.get32(input);
    let reg_umr = is_reg_umr(model, qpn)?;
    let view = engine(model, reg_umr).0.query(qpn);
    let (Some(view), Some(qp)) = (view, model.hca.objects.qps.get(qpn)) else {
        return Err(refuse!(MLX5_CMD_STAT_BAD_RES_ERR));
    };
    let context = query_qp_out::QPC.of_mut(output);
    context.copy_from_slice(&qp.context);
    let state = match view.state {
        State::Reset => constants::MLX5_QPC_STATE_RST,
        State::Init => constants::MLX5_QPC_STATE_INIT,
        State::Rtr => constants::MLX5_QPC_STATE_RTR,
        State::Rts => constants::MLX5_QPC_STATE_RTS,
        State::Sqe => constants::MLX5_QPC_STATE_SQER,
        State::Sqd if view.draining => constants::MLX5_QP_STATE_SQ_DRAINING,
        State::Sqd => constants::MLX5_QP_STATE_SQD,
        State::Err => constants::MLX5_QPC_STATE_ERR,
    };
    qpc::STATE.set(context, state);
    qpc::MTU.set(context, view.mtu.code());
    qpc::REMOTE_QPN.set(context, view.remote_qpn);
    qpc::NEXT_SEND_PSN.set(context, view.send_psn);
    qpc::NEXT_RCV_PSN.set(context, view.receive_psn);
    qpc::LAST_ACKED_PSN.set(context, view.unacknowledged_psn.wrapping_sub(1));
    qpc::RMSN.set(context, view.msn);
    qpc::Q_KEY.set(context, view.qkey);
    qpc::RRE.set(context, view.access.read);
    qpc::RWE.set(context, view.access.write);
    qpc::RAE.set(context, view.access.atomic);
    let (sent, received) = qp.counters();
    qpc::HW_SQ_WQEBB_COUNTER.set(context, sent);
    qpc::HW_RQ_COUNTER.set(context, received);
    if let Some(path) = view.path {
        let vector = qpc::PRIMARY_ADDRESS_PATH.of_mut(context);
        ads::RLID.set(vector, path.dlid);
        ads::MLID.set(vector, path.path_bits);
        ads::SL.set(vector, path.sl);
        ads::GRH.set(vector, path.grh.is_some());
        if let Some(grh) = path.grh {
            ads::SRC_ADDR_INDEX.set(vector, grh.sgid_index);
            ads::HOP_LIMIT.set(vector, grh.hop_limit);
            ads::TCLASS.set(vector, grh.traffic_class);
            ads::FLOW_LABEL.set(vector, grh.flow_label);
            ads::RGID_RIP.of_mut(vector).copy_from_slice(&grh.dgid.0);
        }
    }
    Ok(())
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! Counter commands: vport counters, port counters, queue counters.

use p2pmem_ib::{Counters, LinkCounters};

use super::{Outcome, refuse};
use crate::counters::difference;
use crate::layout::{Field, Part, constants, ifc::*};
use crate::model::Model;

/// A queue counter set. The transport counts for all QPs together. A set shows the difference to the time of its
/// allocation or its last clear.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CounterSet {
    base: Counters,
}

pub(super) fn query_vport(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    if query_vport_counter_in::OTHER_VPORT.is_set(input) {
        return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR));
    }
    let link = since(&model.hca.port.counters(), &model.hca.port_base);
    // The counters of a virtual port include what the adapter sends to itself, those of the physical port do not.
    let set = |output: &mut [u8], part: Part, packets: u64, octets: u64| {
        part.field(traffic_counter::PACKETS).set(output, packets);
        part.field(traffic_counter::OCTETS).set(output, octets);
    };
    set(
        output,
        query_vport_counter_out::RECEIVED_IB_UNICAST,
        link.rx_packets + link.loopback_packets,
        link.rx_bytes + link.loopback_bytes,
    );
    set(
        output,
        query_vport_counter_out::TRANSMITTED_IB_UNICAST,
        link.tx_packets + link.loopback_packets,
        link.tx_bytes + link.loopback_bytes,
    );
    set(output, query_vport_counter_out::TRANSMIT_ERRORS, link.dropped, 0);
    if query_vport_counter_in::CLEAR.is_set(input) {
        model.hca.port_base = model.hca.port.counters();
    }
    Ok(())
}

/// Returns the link counters since `base`.
pub(crate) fn since(now: &LinkCounters, base: &LinkCounters) -> LinkCounters {
    LinkCounters {
        tx_packets: now.tx_packets.saturating_sub(base.tx_packets),
        tx_bytes: now.tx_bytes.saturating_sub(base.tx_bytes),
        rx_packets: now.rx_packets.saturating_sub(base.rx_packets),
        rx_bytes: now.rx_bytes.saturating_sub(base.rx_bytes),
        loopback_packets: now.loopback_packets.saturating_sub(base.loopback_packets),
        loopback_bytes: now.loopback_bytes.saturating_sub(base.loopback_bytes),
        lost: now.lost.saturating_sub(base.lost),
        dropped: now.dropped.saturating_sub(base.dropped),
        downs: now.downs.saturating_sub(base.downs),
    }
}

/// Reads access register PPCNT.
pub(super) fn port_counters(model: &mut Model<'_>, register: &mut [u8]) -> Outcome {
    super::register::check_port(ppcnt_reg::LOCAL_PORT.get32(register))?;
    let link = since(&model.hca.port.counters(), &model.hca.port_base);
    let group = ppcnt_reg::GRP.get32(register);
    let clear = ppcnt_reg::CLR.is_set(register);
    let set = ppcnt_reg::COUNTER_SET.of_mut(register);
    match group {
        constants::MLX5_INFINIBAND_PORT_COUNTERS_GROUP => {
            use ib_port_cntrs_grp_data_layout as counter;
            // These counters saturate.
            for (field, value) in [
                (counter::LINK_DOWNED_COUNTER, link.downs),
                (counter::PORT_XMIT_DISCARDS, link.dropped),
            ] {
                field.set(set, value.min(field.max()));
            }
        }
        constants::MLX5_INFINIBAND_EXTENDED_PORT_COUNTERS_GROUP => {
            use ib_ext_port_cntrs_grp_data_layout as counter;
            for (high, value) in [
                (counter::PORT_XMIT_DATA_HIGH, link.tx_bytes),
                (counter::PORT_RCV_DATA_HIGH, link.rx_bytes),
                (counter::PORT_XMIT_PKTS_HIGH, link.tx_packets),
                (counter::PORT_RCV_PKTS_HIGH, link.rx_packets),
                (counter::PORT_UNICAST_XMIT_PKTS_HIGH, link.tx_packets),
                (counter::PORT_UNICAST_RCV_PKTS_HIGH, link.rx_packets),
            ] {
                // The high and the low word are adjacent.
                Field::new(high.offset(), 64).set(set, value);
            }
        }
        _ => return Err(refuse!(MLX5_CMD_STAT_BAD_PARAM_ERR)),
    }
    if clear {
        model.hca.port_base = model.hca.port.counters();
    }
    Ok(())
}

pub(super) fn alloc(model: &mut Model<'_>, _: &[u8], output: &mut [u8]) -> Outcome {
    let set = CounterSet {
        base: model.engine.counters(),
    };
    let id = model
        .hca
        .objects
        .counter_sets
        .add(set)
        .ok_or(refuse!(MLX5_CMD_STAT_NO_RES_ERR))?;
    alloc_q_counter_out::COUNTER_SET_ID.set(output, id);
    Ok(())
}

pub(super) fn dealloc(model: &mut Model<'_>, input: &[u8], _: &mut [u8]) -> Outcome {
    let id = dealloc_q_counter_in::COUNTER_SET_ID.get32(input);
    let removed = model.hca.objects.counter_sets.remove(id);
    removed.map(drop).ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))
}

pub(super) fn query(model: &mut Model<'_>, input: &[u8], output: &mut [u8]) -> Outcome {
    use query_q_counter_out as counter;
    let id = query_q_counter_in::COUNTER_SET_ID.get32(input);
    let now = model.engine.counters();
    let set = model
        .hca
        .objects
        .counter_sets
        .get_mut(id)
        .ok_or(refuse!(MLX5_CMD_STAT_BAD_RES_ERR))?;
    let counted = difference(&now, &set.base);
    for (field, value) in [
        (
            counter::OUT_OF_BUFFER,
            counted.rnr_naks_sent + counted.datagrams_dropped,
        ),
        (counter::OUT_OF_SEQUENCE, counted.sequence_naks_sent),
        (counter::DUPLICATE_REQUEST, counted.duplicates),
        (counter::RNR_NAK_RETRY_ERR, counted.rnr_naks_received),
        (counter::PACKET_SEQ_ERR, counted.sequence_naks_received),
        (counter::LOCAL_ACK_TIMEOUT_ERR, counted.timeouts),
        (counter::RESP_REMOTE_ACCESS_ERRORS, counted.remote_access_errors),
        (counter::RESP_REMOTE_INVALID_REQUEST, counted.invalid_requests),
        (counter::RESP_CQE_ERROR, counted.error_completions),
        (counter::RESP_CQE_FLUSH_ERROR, counted.flushed),
    ] {
        // Truncated on purpose: the counters wrap around.
        field.set(output, value);
    }
    if query_q_counter_in::CLEAR.is_set(input) {
        set.base = now;
    }
    Ok(())
}

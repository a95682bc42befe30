// SPDX-License-Identifier: MIT OR Apache-2.0

//! Datagrams (UD and the general services interface): addressing and reception.

use std::sync::Arc;

use tracing::debug;

use super::Context;
use super::qp::{GSI_QPN, Qp, route};
use super::responder::Disposition;
use crate::attributes::{PortAttributes, Service};
use crate::host::Fault;
use crate::packet::{Deth, Extended, MULTICAST_LID, Packet, operation};
use crate::work::{AddressVector, Received, Status, UdSource};

/// Longest message.
pub(super) const MAX_PAYLOAD: u64 = 4096;
/// Bytes at the start of every receive that are reserved for a global route header.
pub(super) const GRH_BYTES: usize = 40;
/// The Q_Key of queue pair 1.
const GSI_QKEY: u32 = 0x8001_0000;
/// This bit of a Q_Key selects the sending queue pair's own Q_Key.
const OWN_QKEY: u32 = 1 << 31;
/// Mask of a P_Key without the membership bit.
const PKEY_BITS: u16 = 0x7fff;
const PKEY_FULL: u16 = 0x8000;

/// Returns whether two P_Keys match: the partition is the same, and at least one of them is a full member.
pub(super) fn pkeys_match(a: u16, b: u16) -> bool {
    a & PKEY_BITS != 0 && a & PKEY_BITS == b & PKEY_BITS && (a | b) & PKEY_FULL != 0
}

impl Qp {
    /// Builds a datagram without payload.
    pub(super) fn datagram(&self, port: &PortAttributes, to: &AddressVector, psn: u32) -> Packet {
        let mut packet = self.packet(port, 0, psn);
        packet.dlid = to.path.dlid;
        packet.slid = port.lid.wrapping_add(to.path.path_bits.into());
        packet.sl = to.path.sl & 15;
        packet.grh = to.path.grh.map(|grh| Arc::new(route(port, &grh)));
        packet.dest_qpn = to.qpn & crate::psn::MASK;
        let own = if self.config.service == Service::Gsi {
            GSI_QKEY
        } else {
            self.qkey
        };
        let qkey = if to.qkey & OWN_QKEY != 0 { own } else { to.qkey };
        let number = if self.config.service == Service::Gsi {
            GSI_QPN
        } else {
            self.number
        };
        let source_qpn = self.config.source_qpn.unwrap_or(number);
        packet.extended = Extended::Deth(Deth { qkey, source_qpn });
        packet
    }

    /// Handles a received datagram.
    pub(super) fn datagram_request(&mut self, cx: &mut Context<'_>, packet: &Packet) -> Disposition {
        let (Extended::Deth(deth), operation::SEND_ONLY | operation::SEND_ONLY_IMM) =
            (packet.extended, packet.opcode & operation::MASK)
        else {
            cx.shared.counters.packets_dropped += 1;
            return Disposition::Consumed;
        };
        let own = if self.config.service == Service::Gsi {
            GSI_QKEY
        } else {
            self.qkey
        };
        if deth.qkey != own {
            debug!(qpn = self.number, got = deth.qkey, own, "datagram with a wrong Q_Key");
            cx.shared.counters.qkey_violations += 1;
            return Disposition::Consumed;
        }
        if self.responder.receive.is_none() {
            match self.fetch_receive(cx, 0) {
                Ok(Some(receive)) => self.responder.receive = Some(receive),
                Ok(None) => {
                    debug!(qpn = self.number, "no receive posted for the datagram");
                    cx.shared.counters.datagrams_dropped += 1;
                    return Disposition::Consumed;
                }
                Err(_) => {
                    self.fatal(cx);
                    return Disposition::Consumed;
                }
            }
        }
        let Some(mut receive) = self.responder.receive.take() else {
            return Disposition::Consumed;
        };
        let bytes = packet.payload.bytes();
        let length = GRH_BYTES + bytes.len();
        if length as u64 > receive.capacity() || bytes.len() as u64 > MAX_PAYLOAD {
            self.complete_receive(cx, &receive, Status::LocalLength, Received::Send, false, None);
            return self.fail_datagram_qp(cx);
        }
        receive.length = length as u32;
        let mut page_wait = self.responder.page_wait;
        let qpn = self.number;
        let written = page_wait.access(cx, qpn, |cx| {
            if let Some(grh) = &packet.grh {
                receive.scatter(cx, qpn, 0, &grh_bytes(packet, grh))?;
            }
            receive.scatter(cx, qpn, GRH_BYTES as u64, bytes)
        });
        self.responder.page_wait = page_wait;
        match written {
            Ok(()) => {}
            Err(Fault::Page(_)) => {
                self.responder.receive = Some(receive);
                return Disposition::Deferred;
            }
            Err(fault) => {
                let status = Self::local_status(fault);
                self.complete_receive(cx, &receive, status, Received::Send, false, None);
                return self.fail_datagram_qp(cx);
            }
        }
        cx.shared.counters.bytes_received += bytes.len() as u64;
        let what = match packet.opcode & operation::MASK {
            operation::SEND_ONLY_IMM => Received::SendImm(packet.imm),
            _ => Received::Send,
        };
        let port = &cx.shared.port;
        let multicast = packet.dlid >= MULTICAST_LID;
        let source = UdSource {
            qpn: deth.source_qpn,
            lid: packet.slid,
            sl: packet.sl,
            // Not truncated: the LMC has at most 7 bits.
            path_bits: if multicast {
                0
            } else {
                packet.dlid.wrapping_sub(port.lid) as u8
            },
            grh: packet.grh.is_some(),
            pkey_index: port
                .pkeys
                .iter()
                .position(|own| pkeys_match(*own, packet.pkey))
                .unwrap_or(0) as u16,
            multicast,
        };
        self.complete_receive(cx, &receive, Status::Success, what, packet.solicited, Some(source));
        Disposition::Consumed
    }

    /// Enters the error state because a receive of a datagram queue pair failed.
    fn fail_datagram_qp(&mut self, cx: &mut Context<'_>) -> Disposition {
        self.enter_error(cx);
        Disposition::Consumed
    }
}

/// Encodes a global route header as it is written to memory.
fn grh_bytes(packet: &Packet, grh: &crate::packet::GlobalRoute) -> [u8; GRH_BYTES] {
    let mut bytes = [0; GRH_BYTES];
    let version = (6 << 28) | (u32::from(grh.traffic_class) << 20) | (grh.flow_label & 0xf_ffff);
    bytes[..4].copy_from_slice(&version.to_be_bytes());
    // The payload length field covers BTH, DETH, immediate data, payload with padding, and the invariant CRC.
    let imm = if packet.opcode & operation::MASK == operation::SEND_ONLY_IMM {
        4
    } else {
        0
    };
    let length = 12 + 8 + imm + packet.payload.len().next_multiple_of(4) + 4;
    bytes[4..6].copy_from_slice(&(length as u16).to_be_bytes());
    bytes[6] = 0x1b;
    bytes[7] = grh.hop_limit;
    bytes[8..24].copy_from_slice(&grh.sgid.0);
    bytes[24..].copy_from_slice(&grh.dgid.0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_match_unless_both_are_limited_members() {
        assert!(pkeys_match(0xffff, 0xffff));
        assert!(pkeys_match(0xffff, 0x7fff));
        assert!(!pkeys_match(0x7fff, 0x7fff));
        assert!(!pkeys_match(0xffff, 0x8001));
        assert!(!pkeys_match(0x8000, 0x8000));
        assert!(!pkeys_match(0, 0));
    }
}

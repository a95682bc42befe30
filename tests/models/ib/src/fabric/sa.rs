// SPDX-License-Identifier: MIT OR Apache-2.0

//! Subnet administration: responds to management datagrams that hosts send to the subnet manager's LID.
//!
//! Supports the queries of host stacks: path records (connection managers), multicast membership (IP over InfiniBand
//! and multicast programs), and ClassPortInfo. All other queries get the status "unsupported". Responses describe this
//! fabric: LIDs and GIDs of the ports, and multicast groups as ports join them and end their membership.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tracing::{debug, info};

use super::network::SM_LID;
use crate::attributes::Mtu;
use crate::packet::{
    Deth, Extended, Gid, GlobalRoute, MULTICAST_LID, PERMISSIVE_LID, Packet, Slice, operation, service,
};

/// Length of a management datagram (MAD).
const MAD_BYTES: usize = 256;
/// Offset of the record in a MAD.
const RECORD_OFFSET: usize = 56;
/// The management class of subnet administration.
const SUBNET_ADMINISTRATION: u8 = 3;
const CLASS_VERSION: u8 = 2;
const QP1: u32 = 1;
const QP1_QKEY: u32 = 0x8001_0000;
/// 100 Gbit/s, as encoded in records.
const RATE: u8 = 16;
/// Packet lifetime: at most 4.096 us times 2 to the power of this. Connection managers derive acknowledgement timeouts
/// from it.
const PACKET_LIFE: u8 = 14;
/// Default path MTU of a group: the value that subnet managers choose for IP over InfiniBand.
const DEFAULT_MTU: u8 = Mtu::B2048.code();
/// Selector: exactly this value.
const SELECTOR_EXACT: u8 = 2;
/// Default Q_Key of a group.
const DEFAULT_QKEY: u32 = 0x0b1b;
const FULL_PKEY: u16 = 0xffff;
/// Join state: receives, and keeps the group alive.
const FULL_MEMBER: u8 = 1;
/// Join state: receives.
const NON_MEMBER: u8 = 2;
/// Join state: keeps the group alive.
const SEND_ONLY_FULL_MEMBER: u8 = 8;
/// Capability: supports send-only full members.
const SEND_ONLY_FULL_SUPPORTED: u32 = 1 << 12;

mod method {
    pub(super) const GET: u8 = 0x01;
    pub(super) const SET: u8 = 0x02;
    pub(super) const DELETE: u8 = 0x15;
    pub(super) const RESPONSE: u8 = 0x80;
    pub(super) const GET_RESPONSE: u8 = 0x81;
}

mod attribute {
    pub(super) const CLASS_PORT_INFO: u16 = 0x01;
    pub(super) const PATH: u16 = 0x35;
    pub(super) const MULTICAST_MEMBER: u16 = 0x38;
}

/// Component mask bits: the fields of the request's record that are valid.
mod component {
    pub(super) const PATH_DGID: u64 = 1 << 2;
    pub(super) const PATH_SGID: u64 = 1 << 3;
    pub(super) const PATH_DLID: u64 = 1 << 4;
    pub(super) const PATH_SLID: u64 = 1 << 5;
    pub(super) const PATH_PKEY: u64 = 1 << 13;
    pub(super) const PATH_SL: u64 = 1 << 15;
    pub(super) const PATH_MTU_SELECTOR: u64 = 1 << 16;
    pub(super) const PATH_MTU: u64 = 1 << 17;
    pub(super) const GROUP_MGID: u64 = 1;
    pub(super) const GROUP_PORT_GID: u64 = 1 << 1;
    pub(super) const GROUP_QKEY: u64 = 1 << 2;
    pub(super) const GROUP_MTU_SELECTOR: u64 = 1 << 4;
    pub(super) const GROUP_MTU: u64 = 1 << 5;
    pub(super) const GROUP_TRAFFIC_CLASS: u64 = 1 << 6;
    pub(super) const GROUP_PKEY: u64 = 1 << 7;
    pub(super) const GROUP_SL: u64 = 1 << 12;
    pub(super) const GROUP_FLOW_LABEL: u64 = 1 << 13;
    pub(super) const GROUP_HOP_LIMIT: u64 = 1 << 14;
    pub(super) const GROUP_JOIN_STATE: u64 = 1 << 16;
}

/// Status of the response to a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
enum MadStatus {
    BadVersion = 0x0004,
    Unsupported = 0x000c,
    NoResources = 0x0100,
    Invalid = 0x0200,
    NoRecords = 0x0300,
    InvalidGid = 0x0500,
    MissingComponents = 0x0600,
}

/// A port as known to subnet administration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PortRecord {
    pub(super) lid: u16,
    pub(super) gid: Gid,
}

#[derive(Debug)]
struct Group {
    mlid: u16,
    qkey: u32,
    pkey: u16,
    mtu: u8,
    traffic_class: u8,
    sl: u8,
    flow_label: u32,
    hop_limit: u8,
    /// Join state of each member, by LID.
    members: BTreeMap<u16, u8>,
}

#[derive(Debug, Default)]
pub(super) struct SubnetAdministrator {
    ports: Vec<PortRecord>,
    groups: BTreeMap<Gid, Group>,
    /// Number of MGIDs assigned so far.
    assigned_mgids: u32,
}

/// Access to the fields of a record.
struct Fields<'a>(&'a mut [u8]);

impl Fields<'_> {
    fn u8(&self, at: usize) -> u8 {
        self.0.get(at).copied().unwrap_or(0)
    }

    fn u16(&self, at: usize) -> u16 {
        (u16::from(self.u8(at)) << 8) | u16::from(self.u8(at + 1))
    }

    fn u32(&self, at: usize) -> u32 {
        (u32::from(self.u16(at)) << 16) | u32::from(self.u16(at + 2))
    }

    fn gid(&self, at: usize) -> Gid {
        Gid(std::array::from_fn(|i| self.u8(at + i)))
    }

    fn set(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.0.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }
}

impl SubnetAdministrator {
    pub(super) fn add(&mut self, port: PortRecord) {
        self.ports.push(port);
    }

    pub(super) fn remove(&mut self, lid: u16) {
        self.ports.retain(|port| port.lid != lid);
        for group in self.groups.values_mut() {
            group.members.remove(&lid);
        }
        self.drop_empty_groups();
    }

    /// Returns the LIDs of the ports that receive packets of a multicast LID.
    pub(super) fn members(&self, mlid: u16) -> Vec<u16> {
        let receives = |state: &u8| state & (FULL_MEMBER | NON_MEMBER) != 0;
        let group = self.groups.values().find(|group| group.mlid == mlid);
        let members = group.into_iter().flat_map(|group| &group.members);
        members
            .filter(|(_, state)| receives(state))
            .map(|(lid, _)| *lid)
            .collect()
    }

    fn drop_empty_groups(&mut self) {
        let lives = |state: &u8| state & (FULL_MEMBER | SEND_ONLY_FULL_MEMBER) != 0;
        self.groups.retain(|mgid, group| {
            let keep = group.members.values().any(lives);
            if !keep {
                info!(%mgid, mlid = group.mlid, "multicast group deleted");
            }
            keep
        });
    }

    /// Builds the response to a packet, or returns `None` if the packet is not a subnet administration request. `up`
    /// has the LIDs of ports whose links are up.
    pub(super) fn respond(&mut self, packet: &Packet, up: &BTreeSet<u16>) -> Option<Packet> {
        let Extended::Deth(deth) = packet.extended else {
            return None;
        };
        let request = packet.payload.bytes();
        let send_only = packet.opcode == service::UD | operation::SEND_ONLY;
        if !send_only || packet.dest_qpn != QP1 || deth.qkey != QP1_QKEY || request.len() < MAD_BYTES {
            debug!(?packet, "not a valid management datagram");
            return None;
        }
        let mut bytes = request[..MAD_BYTES].to_vec();
        let (class, version, requested_method) = (bytes[1], bytes[2], bytes[3]);
        if class != SUBNET_ADMINISTRATION || requested_method & method::RESPONSE != 0 {
            debug!(class, method = requested_method, "not a subnet administration request");
            return None;
        }
        let attribute = u16::from_be_bytes([bytes[16], bytes[17]]);
        let mask = bytes[48..RECORD_OFFSET]
            .iter()
            .fold(0, |mask, byte| (mask << 8) | u64::from(*byte));
        let (head, record) = bytes.split_at_mut(RECORD_OFFSET);
        let mut fields = Fields(record);
        let result = if head[0] != 1 || version != CLASS_VERSION {
            Err(MadStatus::BadVersion)
        } else {
            self.execute(packet.slid, requested_method, attribute, mask, &mut fields, up)
        };
        debug!(
            from = packet.slid,
            method = requested_method,
            attribute,
            mask,
            ?result,
            "subnet administration request"
        );
        head[3] = match requested_method {
            method::GET | method::SET => method::GET_RESPONSE,
            other => other | method::RESPONSE,
        };
        let (status, words) = match result {
            Ok(words) => (0, words),
            Err(error) => (error as u16, 0),
        };
        head[4..6].copy_from_slice(&status.to_be_bytes());
        head[44..46].copy_from_slice(&u16::to_be_bytes(words));
        Some(reply(packet, deth, bytes))
    }

    /// Executes a request and writes the result to the request's record. Returns the record's length in units of 8
    /// bytes.
    fn execute(
        &mut self,
        from: u16,
        requested_method: u8,
        attribute: u16,
        mask: u64,
        fields: &mut Fields<'_>,
        up: &BTreeSet<u16>,
    ) -> Result<u16, MadStatus> {
        match (requested_method, attribute) {
            (method::GET, attribute::CLASS_PORT_INFO) => {
                fields.0.fill(0);
                fields.set(0, &[1, CLASS_VERSION]);
                fields.set(
                    4,
                    &((SEND_ONLY_FULL_SUPPORTED << 5) | u32::from(PACKET_LIFE)).to_be_bytes(),
                );
                Ok(9)
            }
            (method::GET, attribute::PATH) => self.path(from, mask, fields, up).map(|()| 8),
            (method::GET, attribute::MULTICAST_MEMBER) => {
                let mgid = fields.gid(0);
                let group = self.groups.get(&mgid).filter(|_| mask & component::GROUP_MGID != 0);
                write_group(fields, &mgid, group.ok_or(MadStatus::NoRecords)?, None);
                Ok(7)
            }
            (method::SET, attribute::MULTICAST_MEMBER) => self.join(mask, fields).map(|()| 7),
            (method::DELETE, attribute::MULTICAST_MEMBER) => self.delete_membership(mask, fields).map(|()| 7),
            _ => Err(MadStatus::Unsupported),
        }
    }

    fn path(&self, from: u16, mask: u64, fields: &mut Fields<'_>, up: &BTreeSet<u16>) -> Result<(), MadStatus> {
        use component::*;
        let find = |by_gid: u64, gid_at: usize, by_lid: u64, lid_at: usize| {
            let (gid, lid) = (fields.gid(gid_at), fields.u16(lid_at));
            let fits =
                |port: &&PortRecord| (mask & by_gid == 0 || port.gid == gid) && (mask & by_lid == 0 || port.lid == lid);
            (mask & (by_gid | by_lid) != 0).then(|| self.ports.iter().find(fits).copied())
        };
        let source = match find(PATH_SGID, 24, PATH_SLID, 42) {
            Some(port) => port.ok_or(MadStatus::NoRecords)?,
            None => *self
                .ports
                .iter()
                .find(|port| port.lid == from)
                .ok_or(MadStatus::NoRecords)?,
        };
        let dgid = fields.gid(8);
        let group = self.groups.get(&dgid).filter(|_| mask & PATH_DGID != 0);
        let (destination, mut mtu) = match group {
            Some(group) => (
                PortRecord {
                    lid: group.mlid,
                    gid: dgid,
                },
                group.mtu,
            ),
            None => {
                let port = find(PATH_DGID, 8, PATH_DLID, 40).ok_or(MadStatus::MissingComponents)?;
                let port = port.filter(|port| up.contains(&port.lid)).ok_or(MadStatus::NoRecords)?;
                (port, Mtu::B4096.code())
            }
        };
        let pkey = if mask & PATH_PKEY != 0 {
            fields.u16(50)
        } else {
            FULL_PKEY
        };
        if pkey & 0x7fff != FULL_PKEY & 0x7fff {
            return Err(MadStatus::NoRecords);
        }
        let sl = if mask & PATH_SL != 0 { fields.u16(52) & 15 } else { 0 };
        if mask & PATH_MTU != 0 && mask & PATH_MTU_SELECTOR != 0 {
            let (selector, wanted) = (fields.u8(54) >> 6, fields.u8(54) & 0x3f);
            let fits = match selector {
                0 => mtu > wanted,
                1 => {
                    mtu = mtu.min(wanted.saturating_sub(1));
                    mtu > 0
                }
                SELECTOR_EXACT => {
                    let possible = wanted <= mtu;
                    mtu = wanted;
                    possible
                }
                _ => true,
            };
            if !fits {
                return Err(MadStatus::NoRecords);
            }
        }
        fields.0.fill(0);
        fields.set(8, &destination.gid.0);
        fields.set(24, &source.gid.0);
        fields.set(40, &destination.lid.to_be_bytes());
        fields.set(42, &source.lid.to_be_bytes());
        // The path is reversible; the response has one path.
        fields.set(49, &[0x81]);
        fields.set(50, &pkey.to_be_bytes());
        fields.set(52, &sl.to_be_bytes());
        fields.set(54, &[exact(mtu), exact(RATE), exact(PACKET_LIFE)]);
        Ok(())
    }

    /// Returns the LID of the port that joins a group or ends its membership.
    fn member(&self, mask: u64, fields: &Fields<'_>) -> Result<u16, MadStatus> {
        if mask & component::GROUP_PORT_GID == 0 {
            return Err(MadStatus::MissingComponents);
        }
        let gid = fields.gid(16);
        self.ports
            .iter()
            .find(|port| port.gid == gid)
            .map(|port| port.lid)
            .ok_or(MadStatus::InvalidGid)
    }

    fn join(&mut self, mask: u64, fields: &mut Fields<'_>) -> Result<(), MadStatus> {
        use component::*;
        let lid = self.member(mask, fields)?;
        let state = fields.u8(48) & 15;
        if mask & GROUP_JOIN_STATE == 0 || state == 0 {
            return Err(MadStatus::MissingComponents);
        }
        let mut mgid = if mask & GROUP_MGID != 0 {
            fields.gid(0)
        } else {
            Gid::default()
        };
        if mgid == Gid::default() {
            mgid = self.new_mgid();
        } else if !mgid.is_multicast() {
            return Err(MadStatus::Invalid);
        }
        if let Some(group) = self.groups.get_mut(&mgid) {
            return join_group(group, mask, fields, &mgid, lid, state);
        }
        if state & (FULL_MEMBER | SEND_ONLY_FULL_MEMBER) == 0 {
            return Err(MadStatus::Invalid);
        }
        let mut group = self.new_group(mask, fields)?;
        join_group(&mut group, mask, fields, &mgid, lid, state)?;
        info!(%mgid, mlid = group.mlid, "multicast group created");
        self.groups.insert(mgid, group);
        Ok(())
    }

    fn new_group(&self, mask: u64, fields: &Fields<'_>) -> Result<Group, MadStatus> {
        use component::*;
        let mut mlids = MULTICAST_LID..PERMISSIVE_LID;
        let is_free = |mlid: &u16| self.groups.values().all(|group| group.mlid != *mlid);
        let mlid = mlids.find(is_free).ok_or(MadStatus::NoResources)?;
        let has = |component| mask & component != 0;
        let mtu = fields.u8(38) & 0x3f;
        let mtu = match fields.u8(38) >> 6 {
            _ if !has(GROUP_MTU) || !has(GROUP_MTU_SELECTOR) => DEFAULT_MTU,
            0 => mtu + 1,
            1 => mtu.saturating_sub(1),
            SELECTOR_EXACT => mtu,
            _ => Mtu::B4096.code(),
        };
        Mtu::from_code(mtu).ok_or(MadStatus::Invalid)?;
        let flow = fields.u32(44);
        Ok(Group {
            mlid,
            qkey: if has(component::GROUP_QKEY) {
                fields.u32(32)
            } else {
                DEFAULT_QKEY
            },
            pkey: if has(GROUP_PKEY) { fields.u16(40) } else { FULL_PKEY },
            mtu,
            traffic_class: if has(GROUP_TRAFFIC_CLASS) { fields.u8(39) } else { 0 },
            // Not truncated: 4 bits.
            sl: if has(GROUP_SL) { (flow >> 28) as u8 } else { 0 },
            flow_label: if has(GROUP_FLOW_LABEL) {
                (flow >> 8) & 0xf_ffff
            } else {
                0
            },
            hop_limit: if has(GROUP_HOP_LIMIT) { fields.u8(47) } else { 0 },
            members: BTreeMap::new(),
        })
    }

    /// Assigns an MGID to a group that is created without one: link-local and transient, from a range reserved for this
    /// purpose.
    fn new_mgid(&mut self) -> Gid {
        self.assigned_mgids += 1;
        let mut gid = [0; 16];
        gid[..4].copy_from_slice(&[0xff, 0x12, 0xa0, 0x1c]);
        gid[12..].copy_from_slice(&self.assigned_mgids.to_be_bytes());
        Gid(gid)
    }

    fn delete_membership(&mut self, mask: u64, fields: &mut Fields<'_>) -> Result<(), MadStatus> {
        let lid = self.member(mask, fields)?;
        let mgid = fields.gid(0);
        let group = self.groups.get_mut(&mgid).ok_or(MadStatus::Invalid)?;
        let state = fields.u8(48) & 15;
        let has = group.members.get_mut(&lid).ok_or(MadStatus::Invalid)?;
        if *has & state == 0 {
            return Err(MadStatus::Invalid);
        }
        *has &= !state;
        if *has == 0 {
            group.members.remove(&lid);
        }
        write_group(fields, &mgid, group, Some(lid));
        self.drop_empty_groups();
        Ok(())
    }
}

/// Adds a port to a group if the requested attributes match the group's.
fn join_group(
    group: &mut Group,
    mask: u64,
    fields: &mut Fields<'_>,
    mgid: &Gid,
    lid: u16,
    state: u8,
) -> Result<(), MadStatus> {
    use component::*;
    let pkey = fields.u16(40);
    let wanted_mtu = fields.u8(38) & 0x3f;
    let mtu_fits = match fields.u8(38) >> 6 {
        _ if mask & GROUP_MTU == 0 || mask & GROUP_MTU_SELECTOR == 0 => true,
        0 => group.mtu > wanted_mtu,
        1 => group.mtu < wanted_mtu,
        SELECTOR_EXACT => group.mtu == wanted_mtu,
        _ => true,
    };
    if mask & GROUP_QKEY != 0 && fields.u32(32) != group.qkey
        || mask & GROUP_PKEY != 0 && pkey & 0x7fff != group.pkey & 0x7fff
        || !mtu_fits
    {
        return Err(MadStatus::Invalid);
    }
    *group.members.entry(lid).or_default() |= state;
    write_group(fields, mgid, group, Some(lid));
    Ok(())
}

/// Adds the selector "exactly" to a value.
fn exact(value: u8) -> u8 {
    (SELECTOR_EXACT << 6) | value
}

/// Writes a group's record. Of the member's fields, only the join state changes.
fn write_group(fields: &mut Fields<'_>, mgid: &Gid, group: &Group, member: Option<u16>) {
    fields.set(0, &mgid.0);
    fields.set(32, &group.qkey.to_be_bytes());
    fields.set(36, &group.mlid.to_be_bytes());
    fields.set(38, &[exact(group.mtu), group.traffic_class]);
    fields.set(40, &group.pkey.to_be_bytes());
    fields.set(42, &[exact(RATE), exact(PACKET_LIFE)]);
    let flow = (u32::from(group.sl) << 28) | (group.flow_label << 8) | u32::from(group.hop_limit);
    fields.set(44, &flow.to_be_bytes());
    let state = member.and_then(|lid| group.members.get(&lid)).copied().unwrap_or(0);
    // The scope is a part of the MGID.
    fields.set(48, &[(mgid.0[1] << 4) | state]);
}

/// Builds a datagram to the sender of `request`.
fn reply(request: &Packet, deth: Deth, bytes: Vec<u8>) -> Packet {
    let len = bytes.len();
    let grh = request.grh.as_ref().map(|grh| {
        Arc::new(GlobalRoute {
            sgid: grh.dgid,
            dgid: grh.sgid,
            hop_limit: 0xff,
            ..**grh
        })
    });
    Packet {
        dlid: request.slid,
        slid: SM_LID,
        sl: request.sl,
        opcode: service::UD | operation::SEND_ONLY,
        solicited: false,
        ack_request: false,
        pkey: request.pkey,
        dest_qpn: deth.source_qpn,
        psn: request.psn,
        grh,
        extended: Extended::Deth(Deth {
            qkey: QP1_QKEY,
            source_qpn: QP1,
        }),
        srqn: 0,
        imm: 0,
        payload: Slice::new(&Arc::new(bytes), 0, len),
    }
}

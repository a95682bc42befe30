// SPDX-License-Identifier: MIT OR Apache-2.0

//! HCA capabilities and the limits of the model.
//!
//! Documentation/testbed/nic.md explains the values.

use super::layout::ifc::{
    atomic_caps, cmd_hca_cap, hca_cap_union, odp_cap, odp_per_transport_service_cap, odp_scheme_cap,
};
use super::layout::{Field, constants};

/// Limits of the model. `LOG_` values are logarithms.
pub(super) mod limit {
    pub(crate) const LOG_QPS: u32 = 16;
    pub(crate) const LOG_CQS: u32 = 16;
    pub(crate) const LOG_SRQS: u32 = 14;
    pub(crate) const LOG_EQS: u32 = 6;
    pub(crate) const LOG_PDS: u32 = 16;
    pub(crate) const LOG_XRCDS: u32 = 14;
    pub(crate) const LOG_MKEYS: u32 = 20;
    pub(crate) const LOG_TRANSPORT_DOMAINS: u32 = 14;
    pub(crate) const LOG_MULTICAST_GROUPS: u32 = 14;
    /// Queue pairs per multicast group.
    pub(crate) const MULTICAST_QPS: u32 = 240;
    /// Queue counter sets. Their numbers have 8 bits, and 0 is reserved.
    pub(crate) const Q_COUNTERS: u32 = 255;
    /// Entries of a send queue (of 64 bytes each) or receive queue.
    pub(crate) const LOG_QP_SIZE: u32 = 15;
    pub(crate) const LOG_SRQ_SIZE: u32 = 15;
    pub(crate) const LOG_CQ_SIZE: u32 = 22;
    pub(crate) const LOG_EQ_SIZE: u32 = 20;
    /// Maximum bytes of a work queue entry. The NVMe target needs more than 512 in a send queue.
    pub(crate) const SEND_ENTRY: u32 = 1024;
    pub(crate) const RECEIVE_ENTRY: u32 = 512;
    /// Outstanding RDMA READs and atomics of a queue pair, as requester and as responder.
    pub(crate) const LOG_READS: u32 = 4;
    /// Maximum bytes of a message.
    pub(crate) const LOG_MESSAGE: u32 = 30;
    /// Entries of the port's GID and P_Key tables. 128 is the smallest P_Key table size that the driver supports.
    pub(crate) const GIDS: usize = 8;
    pub(crate) const PKEYS: usize = 128;
}

/// Frequency of the adapter's clock: one tick per nanosecond.
const CLOCK_KHZ: u32 = 1_000_000;
/// Supported atomic operations: compare-and-swap and fetch-and-add.
const ATOMIC_OPERATIONS: u32 = 0b11;
/// Supported operand size of atomic operations: 8 bytes.
const ATOMIC_SIZE: u32 = 8;

/// Supported capability types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CapType {
    /// General device capabilities.
    General,
    /// Atomic capabilities.
    Atomic,
    /// On-demand paging capabilities.
    Odp,
}

impl CapType {
    /// Converts the capability type of a command.
    pub(super) fn new(number: u32) -> Option<Self> {
        Some(match number {
            constants::MLX5_CAP_GENERAL => Self::General,
            constants::MLX5_CAP_ATOMIC => Self::Atomic,
            constants::MLX5_CAP_ODP => Self::Odp,
            _ => return None,
        })
    }
}

/// Current capabilities.
#[derive(Clone, Debug)]
pub(super) struct Caps {
    general: Vec<u8>,
    atomic: Vec<u8>,
    odp: Vec<u8>,
}

/// Creates a capability structure from field values.
fn from_fields(fields: &[(Field, u64)]) -> Vec<u8> {
    let mut bytes = vec![0; hca_cap_union::BYTES];
    for (field, value) in fields {
        debug_assert!(*value <= field.max(), "{field:?} cannot hold {value}");
        field.set(&mut bytes, *value);
    }
    bytes
}

fn general() -> Vec<u8> {
    use cmd_hca_cap as cap;
    let wide = |value: u32| u64::from(value);
    from_fields(&[
        // Numbers and sizes of objects.
        (cap::LOG_MAX_QP, wide(limit::LOG_QPS)),
        (cap::LOG_MAX_QP_SZ, wide(limit::LOG_QP_SIZE)),
        (cap::LOG_MAX_SRQ, wide(limit::LOG_SRQS)),
        (cap::LOG_MAX_SRQ_SZ, wide(limit::LOG_SRQ_SIZE)),
        (cap::LOG_MAX_CQ, wide(limit::LOG_CQS)),
        (cap::LOG_MAX_CQ_SZ, wide(limit::LOG_CQ_SIZE)),
        (cap::LOG_MAX_EQ, wide(limit::LOG_EQS)),
        (cap::LOG_MAX_EQ_SZ, wide(limit::LOG_EQ_SIZE)),
        (cap::MAX_NUM_EQS, 1 << limit::LOG_EQS),
        (cap::LOG_MAX_PD, wide(limit::LOG_PDS)),
        (cap::LOG_MAX_XRCD, wide(limit::LOG_XRCDS)),
        (cap::LOG_MAX_TRANSPORT_DOMAIN, wide(limit::LOG_TRANSPORT_DOMAINS)),
        (cap::LOG_MAX_RMP, wide(limit::LOG_SRQS)),
        (cap::LOG_MAX_MCG, wide(limit::LOG_MULTICAST_GROUPS)),
        (cap::MAX_QP_MCG, wide(limit::MULTICAST_QPS)),
        (cap::MAX_QP_CNT, wide(limit::Q_COUNTERS)),
        // Queue pairs.
        (cap::MAX_WQE_SZ_SQ, wide(limit::SEND_ENTRY)),
        (cap::MAX_WQE_SZ_RQ, wide(limit::RECEIVE_ENTRY)),
        (cap::LOG_MAX_RA_REQ_QP, wide(limit::LOG_READS)),
        (cap::LOG_MAX_RA_RES_QP, wide(limit::LOG_READS)),
        (cap::LOG_MAX_MSG, wide(limit::LOG_MESSAGE)),
        (cap::MAX_SGL_FOR_OPTIMIZED_PERFORMANCE, 30),
        (cap::RC, 1),
        (cap::UC, 1),
        (cap::UD, 1),
        (cap::BLOCK_LB_MC, 1),
        (cap::XRC, 1),
        (cap::ATOMIC, 1),
        (cap::PKV, 1),
        (cap::QKV, 1),
        (cap::LOCAL_CA_ACK_DELAY, 16),
        // Completion queues.
        (cap::CQ_OI, 1),
        (cap::CQ_RESIZE, 1),
        (cap::CQ_MODERATION, 1),
        (cap::SCQE_BREAK_MODERATION, 1),
        // Memory keys.
        (cap::LOG_MAX_MKEY, wide(limit::LOG_MKEYS)),
        (cap::LOG_MAX_MRW_SZ, 64),
        (cap::LOG_MAX_KLM_LIST_SIZE, 16),
        (cap::MAX_INDIRECTION, 4),
        (cap::FIXED_BUFFER_SIZE, 1),
        (cap::UMR_EXTENDED_TRANSLATION_OFFSET, 1),
        (cap::IMAICL, 1),
        (cap::PG, 1),
        // Port.
        (cap::PORT_TYPE, wide(constants::MLX5_CAP_PORT_TYPE_IB)),
        (cap::NUM_PORTS, 1),
        (cap::IB_VIRT, 1),
        (cap::GID_TABLE_SIZE, 0),
        (cap::PKEY_TABLE_SIZE, 0),
        (cap::VPORT_COUNTERS, 1),
        (cap::OUT_OF_SEQ_CNT, 1),
        (cap::RETRANSMISSION_Q_COUNTERS, 1),
        (cap::ENHANCED_ERROR_Q_COUNTERS, 1),
        // UAR and clock.
        (cap::LOG_PG_SZ, 12),
        (cap::LOG_BF_REG_SIZE, 9),
        (cap::NUM_OF_UARS_PER_PAGE, 1),
        (cap::DEVICE_FREQUENCY_KHZ, wide(CLOCK_KHZ)),
        (cap::DEVICE_FREQUENCY_MHZ, wide(CLOCK_KHZ / 1000)),
        (cap::DRIVER_VERSION, 1),
    ])
}

fn atomic() -> Vec<u8> {
    from_fields(&[
        (atomic_caps::SUPPORTED_ATOMIC_REQ_8B_ENDIANNESS_MODE_1, 1),
        (atomic_caps::ATOMIC_REQ_8B_ENDIANNESS_MODE, 1),
        (atomic_caps::ATOMIC_OPERATIONS, ATOMIC_OPERATIONS.into()),
        (atomic_caps::ATOMIC_SIZE_QP, ATOMIC_SIZE.into()),
    ])
}

fn odp() -> Vec<u8> {
    let mut bytes = from_fields(&[(odp_cap::MEM_PAGE_FAULT, 1)]);
    let scheme = odp_cap::MEMORY_PAGE_FAULT_SCHEME_CAP.of_mut(&mut bytes);
    odp_scheme_cap::PAGE_PREFETCH.set(scheme, 1_u32);
    use odp_per_transport_service_cap as service;
    let all = [
        service::SEND,
        service::RECEIVE,
        service::WRITE,
        service::READ,
        service::ATOMIC,
        service::SRQ_RECEIVE,
    ];
    let two = [service::SEND, service::SRQ_RECEIVE];
    for (part, fields) in [
        (odp_scheme_cap::RC_ODP_CAPS, &all[..]),
        (odp_scheme_cap::XRC_ODP_CAPS, &all[..]),
        (odp_scheme_cap::UD_ODP_CAPS, &two[..]),
    ] {
        for field in fields {
            part.field(*field).set(scheme, 1_u32);
        }
    }
    bytes
}

impl Caps {
    /// Returns the capabilities before any SET_HCA_CAP.
    pub(super) fn new() -> Self {
        let mut atomic = atomic();
        atomic_caps::ATOMIC_REQ_8B_ENDIANNESS_MODE.set(&mut atomic, 0_u32);
        Self {
            general: general(),
            atomic,
            odp: odp(),
        }
    }

    /// Returns the current capabilities of a type.
    pub(super) fn current(&self, cap_type: CapType) -> &[u8] {
        match cap_type {
            CapType::General => &self.general,
            CapType::Atomic => &self.atomic,
            CapType::Odp => &self.odp,
        }
    }

    /// Returns the maximum capabilities of a type.
    pub(super) fn max(cap_type: CapType) -> Vec<u8> {
        match cap_type {
            CapType::General => general(),
            CapType::Atomic => atomic(),
            CapType::Odp => odp(),
        }
    }

    /// Executes SET_HCA_CAP. Ignores most fields, because the model does not depend on them. Returns false if the
    /// driver requests an unsupported capability.
    pub(super) fn set(&mut self, cap_type: CapType, wanted: &[u8]) -> bool {
        match cap_type {
            CapType::General => {
                let wanted_qps = cmd_hca_cap::LOG_MAX_QP.get32(wanted);
                let too_much = wanted_qps > limit::LOG_QPS
                    || cmd_hca_cap::CMDIF_CHECKSUM.is_set(wanted)
                    || cmd_hca_cap::LOG_UAR_PAGE_SZ.is_set(wanted)
                    || cmd_hca_cap::PKEY_TABLE_SIZE.is_set(wanted);
                if too_much {
                    return false;
                }
                cmd_hca_cap::LOG_MAX_QP.set(&mut self.general, wanted_qps);
            }
            CapType::Atomic => {
                let mode = atomic_caps::ATOMIC_REQ_8B_ENDIANNESS_MODE.get(wanted);
                if mode > 1 {
                    return false;
                }
                atomic_caps::ATOMIC_REQ_8B_ENDIANNESS_MODE.set(&mut self.atomic, mode);
            }
            // The driver selects a page fault scheme; the model has only one.
            CapType::Odp => {}
        }
        true
    }

    /// Returns whether atomics use host byte order in memory. Otherwise they use big-endian order.
    pub(super) fn atomics_in_host_order(&self) -> bool {
        atomic_caps::ATOMIC_REQ_8B_ENDIANNESS_MODE.is_set(&self.atomic)
    }
}

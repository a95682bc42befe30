// SPDX-License-Identifier: MIT OR Apache-2.0

//! Decoding of the mkey context.

use p2pmem_ib::Rights;

use crate::layout::constants::{
    MLX5_MKC_ACCESS_MODE_KLMS, MLX5_MKC_ACCESS_MODE_KSM, MLX5_MKC_ACCESS_MODE_MTT, MLX5_MKC_ACCESS_MODE_PA,
    MLX5_UMR_FLEX_ALIGNMENT,
};
use crate::layout::ifc::mkc;

/// Alignment of translation lists, in units of 16 bytes. Drivers pad lists to it, also beyond the size in the mkey
/// context, so the model rounds that size up.
const LIST_UNIT: u64 = MLX5_UMR_FLEX_ALIGNMENT as u64 / 16;
/// QP number of an mkey that any QP may use.
const ANY_QP: u32 = 0xff_ffff;

/// Access mode of an mkey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessMode {
    /// Bus addresses, without translation.
    Pa,
    /// Pages of one size.
    Mtt,
    /// List of ranges of other mkeys, each with its own length.
    Klm,
    /// Pages of one size, each of another mkey.
    Ksm,
    /// Not supported.
    Other,
}

/// A decoded mkey context.
#[derive(Clone, Debug)]
pub(super) struct Context {
    pub(super) free: bool,
    pub(super) mode: AccessMode,
    /// UMR work requests may change the mkey.
    pub(super) umr: bool,
    local_read: bool,
    local_write: bool,
    remote_read: bool,
    remote_write: bool,
    atomic: bool,
    pub(super) remote_invalidate: bool,
    pub(super) signature: bool,
    pub(super) qpn: u32,
    pub(super) variant: u8,
    pub(super) pd: u32,
    pub(super) start: u64,
    /// Length in bytes; `None` for the whole address space (`length64`).
    pub(super) len: Option<u64>,
    pub(super) log_page_size: u32,
    /// Maximum size of the translation list, in units of 16 bytes.
    pub(super) octwords: u64,
}

impl Context {
    pub(super) fn read(image: &[u8; mkc::BYTES]) -> Self {
        let mode = (mkc::ACCESS_MODE_4_2.get32(image) << 2) | mkc::ACCESS_MODE_1_0.get32(image);
        Self {
            free: mkc::FREE.is_set(image),
            mode: match mode {
                MLX5_MKC_ACCESS_MODE_PA => AccessMode::Pa,
                MLX5_MKC_ACCESS_MODE_MTT => AccessMode::Mtt,
                MLX5_MKC_ACCESS_MODE_KLMS => AccessMode::Klm,
                MLX5_MKC_ACCESS_MODE_KSM => AccessMode::Ksm,
                _ => AccessMode::Other,
            },
            umr: mkc::UMR_EN.is_set(image),
            local_read: mkc::LR.is_set(image),
            local_write: mkc::LW.is_set(image),
            remote_read: mkc::RR.is_set(image),
            remote_write: mkc::RW.is_set(image),
            atomic: mkc::A.is_set(image),
            remote_invalidate: mkc::EN_RINVAL.is_set(image),
            signature: mkc::BSF_EN.is_set(image),
            qpn: mkc::QPN.get32(image),
            // Not truncated: the field has 8 bits.
            variant: mkc::MKEY_7_0.get(image) as u8,
            pd: mkc::PD.get32(image),
            start: mkc::START_ADDR.get(image),
            len: (!mkc::LENGTH64.is_set(image)).then(|| mkc::LEN.get(image)),
            log_page_size: mkc::LOG_PAGE_SIZE.get32(image),
            octwords: mkc::TRANSLATIONS_OCTWORD_SIZE.get(image).next_multiple_of(LIST_UNIT),
        }
    }

    /// Returns whether every QP of the protection domain may use the mkey.
    pub(super) fn any_qp(&self) -> bool {
        self.qpn == ANY_QP
    }

    /// Returns whether the mkey grants an access right.
    pub(super) fn allows(&self, rights: Rights) -> bool {
        match rights {
            Rights::LocalRead => self.local_read,
            Rights::LocalWrite => self.local_write,
            Rights::RemoteRead => self.remote_read,
            Rights::RemoteWrite => self.remote_write,
            Rights::RemoteAtomic => self.atomic,
        }
    }

    /// Returns whether a range is within the bounds of the mkey.
    pub(super) fn contains(&self, address: u64, len: u64) -> bool {
        match self.len {
            None => len == 0 || address.checked_add(len - 1).is_some(),
            Some(have) => address
                .checked_sub(self.start)
                .and_then(|offset| offset.checked_add(len))
                .is_some_and(|end| end <= have),
        }
    }
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! A key's context in a form that can be worked with.

use p2pmem_ib::Rights;

use crate::layout::constants::{
    MLX5_MKC_ACCESS_MODE_KLMS, MLX5_MKC_ACCESS_MODE_KSM, MLX5_MKC_ACCESS_MODE_MTT, MLX5_MKC_ACCESS_MODE_PA,
    MLX5_UMR_FLEX_ALIGNMENT,
};
use crate::layout::ifc::mkc;

/// The length of a translation list is rounded up to a multiple of this many units of 16 bytes.
const LIST_UNIT: u64 = MLX5_UMR_FLEX_ALIGNMENT as u64 / 16;
/// What a key that is bound to no queue pair has for its number.
const ANY_QP: u32 = 0xff_ffff;

/// How a key's address space is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Bus addresses as they are.
    Physical,
    /// Pages of one size.
    Pages,
    /// Pieces of other keys, one after another.
    Pieces,
    /// Pages of one size, each of another key.
    KeyPages,
    /// Something else.
    Other,
}

/// A context, decoded.
#[derive(Clone, Debug)]
pub(super) struct Context {
    pub(super) free: bool,
    pub(super) mode: Mode,
    /// May be changed by UMR.
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
    /// Length in bytes; `None` for all there is.
    pub(super) len: Option<u64>,
    pub(super) log_page_size: u32,
    /// Space for translations, in units of 16 bytes.
    pub(super) octwords: u64,
}

impl Context {
    pub(super) fn read(image: &[u8; mkc::BYTES]) -> Self {
        let mode = (mkc::ACCESS_MODE_4_2.get32(image) << 2) | mkc::ACCESS_MODE_1_0.get32(image);
        Self {
            free: mkc::FREE.is_set(image),
            mode: match mode {
                MLX5_MKC_ACCESS_MODE_PA => Mode::Physical,
                MLX5_MKC_ACCESS_MODE_MTT => Mode::Pages,
                MLX5_MKC_ACCESS_MODE_KLMS => Mode::Pieces,
                MLX5_MKC_ACCESS_MODE_KSM => Mode::KeyPages,
                _ => Mode::Other,
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
            // Not truncated: eight bits.
            variant: mkc::MKEY_7_0.get(image) as u8,
            pd: mkc::PD.get32(image),
            start: mkc::START_ADDR.get(image),
            len: (!mkc::LENGTH64.is_set(image)).then(|| mkc::LEN.get(image)),
            log_page_size: mkc::LOG_PAGE_SIZE.get32(image),
            octwords: mkc::TRANSLATIONS_OCTWORD_SIZE.get(image).next_multiple_of(LIST_UNIT),
        }
    }

    /// Whether every queue pair of the domain may use the key.
    pub(super) fn any_qp(&self) -> bool {
        self.qpn == ANY_QP
    }

    /// Whether the key allows this.
    pub(super) fn allows(&self, rights: Rights) -> bool {
        match rights {
            Rights::LocalRead => self.local_read,
            Rights::LocalWrite => self.local_write,
            Rights::RemoteRead => self.remote_read,
            Rights::RemoteWrite => self.remote_write,
            Rights::RemoteAtomic => self.atomic,
        }
    }

    /// Whether a range lies in the key's.
    pub(super) fn holds(&self, address: u64, len: u64) -> bool {
        match self.len {
            None => len == 0 || address.checked_add(len - 1).is_some(),
            Some(have) => address
                .checked_sub(self.start)
                .and_then(|offset| offset.checked_add(len))
                .is_some_and(|end| end <= have),
        }
    }
}

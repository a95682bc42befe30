// SPDX-License-Identifier: MIT OR Apache-2.0

//! UMR work requests: register, bind, invalidate and revoke mkeys, in the order of a send queue.
//!
//! A work request selects the mkey context fields to change by a mask, and supplies a context with their values. A work
//! request can supply translations, inline or in memory. The whole request is checked before anything changes.

use p2pmem_ib::{Access, Rights};

use super::context::Context;
use super::{Fault, Mkeys};
use crate::layout::constants::{
    MLX5_MKEY_MASK_A, MLX5_MKEY_MASK_EN_RINVAL, MLX5_MKEY_MASK_FREE, MLX5_MKEY_MASK_KEY, MLX5_MKEY_MASK_LEN,
    MLX5_MKEY_MASK_LR, MLX5_MKEY_MASK_LW, MLX5_MKEY_MASK_PAGE_SIZE, MLX5_MKEY_MASK_PAGE_SIZE_5, MLX5_MKEY_MASK_PD,
    MLX5_MKEY_MASK_QPN, MLX5_MKEY_MASK_RELAXED_ORDERING_READ, MLX5_MKEY_MASK_RELAXED_ORDERING_WRITE, MLX5_MKEY_MASK_RR,
    MLX5_MKEY_MASK_RW, MLX5_MKEY_MASK_SMALL_FENCE, MLX5_MKEY_MASK_START_ADDR,
};
use crate::layout::ifc::mkc;
use crate::layout::wire::{mkey_seg, wqe_data_seg, wqe_umr_ctrl_seg};
use crate::layout::{Field, constants};

/// UMR flag without a name in the headers: the mkey must be bound to the QP of the work request.
const CHECK_QPN: u64 = 1 << 3;
const XLT_OFFSET_ENABLE: u64 = constants::MLX5_UMR_TRANSLATION_OFFSET_EN as u64;
const MUST_BE_FREE: u64 = constants::MLX5_UMR_CHECK_NOT_FREE as u64;
const MUST_NOT_BE_FREE: u64 = constants::MLX5_UMR_CHECK_FREE as u64;
const INLINE: u64 = constants::MLX5_UMR_INLINE as u64;
/// Length of a data segment whose `byte_count` is 0.
const MAX_DATA_LENGTH: u64 = 1 << 31;

/// The low 5 bits and the high bit of the page size, which have separate mask bits.
const PAGE_SIZE_4_0: Field = Field::new(mkc::LOG_PAGE_SIZE.offset() + 1, mkc::LOG_PAGE_SIZE.width() - 1);
const PAGE_SIZE_5: Field = Field::new(mkc::LOG_PAGE_SIZE.offset(), 1);

/// Mask bits, and the context fields that each of them selects.
const FIELDS: [(u64, &[Field]); 17] = [
    (MLX5_MKEY_MASK_LEN as u64, &[mkc::LEN, mkc::LENGTH64]),
    (MLX5_MKEY_MASK_PAGE_SIZE as u64, &[PAGE_SIZE_4_0]),
    (MLX5_MKEY_MASK_PAGE_SIZE_5, &[PAGE_SIZE_5]),
    (MLX5_MKEY_MASK_START_ADDR as u64, &[mkc::START_ADDR]),
    (MLX5_MKEY_MASK_PD as u64, &[mkc::PD]),
    (MLX5_MKEY_MASK_EN_RINVAL as u64, &[mkc::EN_RINVAL]),
    (MLX5_MKEY_MASK_KEY as u64, &[mkc::MKEY_7_0]),
    (MLX5_MKEY_MASK_QPN as u64, &[mkc::QPN]),
    (MLX5_MKEY_MASK_LR as u64, &[mkc::LR]),
    (MLX5_MKEY_MASK_LW as u64, &[mkc::LW]),
    (MLX5_MKEY_MASK_RR as u64, &[mkc::RR]),
    (MLX5_MKEY_MASK_RW as u64, &[mkc::RW]),
    (MLX5_MKEY_MASK_A as u64, &[mkc::A]),
    (
        MLX5_MKEY_MASK_SMALL_FENCE as u64,
        &[mkc::SMALL_FENCE_ON_RDMA_READ_RESPONSE],
    ),
    (
        MLX5_MKEY_MASK_RELAXED_ORDERING_WRITE as u64,
        &[mkc::RELAXED_ORDERING_WRITE],
    ),
    (MLX5_MKEY_MASK_RELAXED_ORDERING_READ, &[mkc::RELAXED_ORDERING_READ]),
    (MLX5_MKEY_MASK_FREE as u64, &[mkc::FREE]),
];

/// Reason why a UMR work request fails. The mkey is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UmrError {
    /// The work request is shorter than its segments.
    #[error("work request shorter than its segments")]
    Short,
    /// The mask selects a field that cannot be changed.
    #[error("mkey mask bits {0:#x} are not supported")]
    Mask(u64),
    /// The mkey does not exist.
    #[error("mkey does not exist")]
    NoKey,
    /// The mkey does not permit UMR (`umr_en`).
    #[error("mkey does not permit UMR")]
    NotAllowed,
    /// The mkey or its new protection domain does not belong to the QP.
    #[error("mkey of another protection domain or queue pair")]
    Domain,
    /// The request requires an mkey in use, and the mkey is free.
    #[error("mkey is free")]
    Free,
    /// The request requires a free mkey, and the mkey is in use.
    #[error("mkey is not free")]
    InUse,
    /// The translations exceed the size of the mkey, or the limit of the adapter.
    #[error("too many translations for the mkey or the adapter")]
    TooManyTranslations,
    /// The translation list is shorter than the request states.
    #[error("translation list too short")]
    List,
}

/// Location of a translation list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum List {
    /// The request has no list.
    None,
    /// Inline in the work request.
    Inline(Vec<u8>),
    /// In memory; the adapter reads it.
    Memory {
        /// lkey of the memory.
        key: u32,
        /// First address.
        address: u64,
        /// Length in bytes.
        length: u64,
    },
}

/// A decoded UMR work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Umr {
    /// The mkey to change. The variant is checked unless the request changes the variant.
    pub key: u32,
    /// The translations.
    pub list: List,
    pub(super) flags: u64,
    pub(super) mask: u64,
    pub(super) octword: u64,
    pub(super) octwords: u64,
    pub(super) context: [u8; mkc::BYTES],
}

/// The QP that a UMR work request was posted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Issuer {
    /// Protection domain of the QP.
    pub pd: u32,
    /// Number of the QP.
    pub qpn: u32,
    /// The QP has service type REG_UMR: it may change mkeys of every protection domain, and their protection domain.
    pub reg_umr: bool,
}

impl Umr {
    /// Decodes a work request. `key` is the immediate of the control segment; `body` is the part after that segment.
    ///
    /// # Errors
    ///
    /// [`UmrError::Short`], [`UmrError::List`] and [`UmrError::Mask`].
    pub fn read(key: u32, body: &[u8]) -> Result<Self, UmrError> {
        const HEAD: usize = wqe_umr_ctrl_seg::BYTES + mkey_seg::BYTES;
        let Some((head, rest)) = body.split_at_checked(HEAD) else {
            return Err(UmrError::Short);
        };
        let (control, seg) = head.split_at(wqe_umr_ctrl_seg::BYTES);
        let flags = wqe_umr_ctrl_seg::FLAGS.get(control);
        let mask = wqe_umr_ctrl_seg::MKEY_MASK.get(control);
        let known = FIELDS.iter().fold(0, |known, (bit, _)| known | bit);
        if mask & !known != 0 {
            return Err(UmrError::Mask(mask & !known));
        }
        let octwords = wqe_umr_ctrl_seg::XLT_OCTOWORDS.get(control);
        let octword = if flags & XLT_OFFSET_ENABLE != 0 {
            (wqe_umr_ctrl_seg::XLT_OFFSET_47_16.get(control) << 16) | wqe_umr_ctrl_seg::XLT_OFFSET.get(control)
        } else {
            0
        };
        let length = octwords * 16;
        let list = if octwords == 0 {
            List::None
        } else if flags & INLINE != 0 {
            // Not truncated: a 16-bit count of 16-byte units.
            List::Inline(rest.get(..length as usize).ok_or(UmrError::Short)?.to_vec())
        } else {
            let data = rest.get(..wqe_data_seg::BYTES).ok_or(UmrError::Short)?;
            let have = match wqe_data_seg::BYTE_COUNT.get(data) {
                0 => MAX_DATA_LENGTH,
                count => count,
            };
            if have < length {
                return Err(UmrError::List);
            }
            List::Memory {
                key: wqe_data_seg::LKEY.get32(data),
                address: wqe_data_seg::ADDR.get(data),
                length,
            }
        };
        let mut context = [0; mkc::BYTES];
        context.copy_from_slice(seg);
        Ok(Self {
            key,
            list,
            flags,
            mask,
            octword,
            octwords,
            context,
        })
    }

    /// Returns the access that reads the translations, if they are in memory.
    pub fn list_access(&self, issuer: &Issuer) -> Option<Access> {
        match self.list {
            List::Memory { key, address, length } => Some(Access {
                key,
                address,
                length,
                rights: Rights::LocalRead,
                pd: issuer.pd,
                qpn: issuer.qpn,
            }),
            List::None | List::Inline(_) => None,
        }
    }
}

impl Mkeys {
    /// Executes a UMR work request. `memory` holds the bytes of the access from [`Umr::list_access`]; empty without
    /// one.
    ///
    /// # Errors
    ///
    /// See [`UmrError`].
    pub fn apply(&mut self, umr: &Umr, memory: &[u8], issuer: &Issuer) -> Result<(), UmrError> {
        let list = match &umr.list {
            List::None => &[],
            List::Inline(list) => list.as_slice(),
            List::Memory { .. } => memory,
        };
        if list.len() as u64 != umr.octwords * 16 {
            return Err(UmrError::List);
        }
        let (words, limit) = (self.words, self.limits.words);
        let found = self.keys.get_mut(umr.key >> 8).filter(|key| !key.retired);
        let key = found.ok_or(UmrError::NoKey)?;
        let context = &key.context;
        if !context.umr {
            return Err(UmrError::NotAllowed);
        }
        let foreign = context.pd != issuer.pd || umr.mask & u64::from(MLX5_MKEY_MASK_PD) != 0;
        let other_qp = umr.flags & CHECK_QPN != 0 && context.qpn != issuer.qpn;
        if foreign && !issuer.reg_umr || other_qp {
            return Err(UmrError::Domain);
        }
        if umr.mask & u64::from(MLX5_MKEY_MASK_KEY) == 0 && u32::from(context.variant) != umr.key & 0xff {
            return Err(UmrError::NoKey);
        }
        if umr.flags & MUST_BE_FREE != 0 && !context.free {
            return Err(UmrError::InUse);
        }
        if umr.flags & MUST_NOT_BE_FREE != 0 && context.free {
            return Err(UmrError::Free);
        }
        let end = umr
            .octword
            .checked_add(umr.octwords)
            .ok_or(UmrError::TooManyTranslations)?;
        if umr.octwords != 0 && end > context.octwords {
            return Err(UmrError::TooManyTranslations);
        }
        let after = words - key.translations.words() + key.translations.words_with(umr.octword, list.len());
        if after > limit {
            return Err(UmrError::TooManyTranslations);
        }
        for (_, fields) in FIELDS.iter().filter(|(bit, _)| umr.mask & bit != 0) {
            for field in *fields {
                field.set(&mut key.image, field.get(&umr.context));
            }
        }
        key.context = Context::read(&key.image);
        key.translations.write(umr.octword, list, false);
        self.words = after;
        Ok(())
    }

    /// Converts the fault of a failed read of the translation list.
    pub fn list_fault(fault: Fault) -> UmrError {
        match fault {
            Fault::Domain => UmrError::Domain,
            _ => UmrError::List,
        }
    }
}

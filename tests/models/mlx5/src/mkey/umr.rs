// SPDX-License-Identifier: MIT OR Apache-2.0

//! UMR work requests: registration, binding, invalidation and revocation of keys in the order of a send queue.
//!
//! A request says which fields of the key's context change (a mask and a context to take them from) and may bring
//! translations, in the request itself or in memory. All of it is checked before any of it is done.

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

/// Flag that the headers do not name: the key must be bound to the queue pair that sends this.
const CHECK_QPN: u64 = 1 << 3;
const OFFSET: u64 = constants::MLX5_UMR_TRANSLATION_OFFSET_EN as u64;
const MUST_BE_FREE: u64 = constants::MLX5_UMR_CHECK_NOT_FREE as u64;
const MUST_NOT_BE_FREE: u64 = constants::MLX5_UMR_CHECK_FREE as u64;
const INLINE: u64 = constants::MLX5_UMR_INLINE as u64;
/// What a data segment means by a length of 0.
const WHOLE: u64 = 1 << 31;

/// The low bits of the page size, which its own mask bit stands for, and the high one, which another does.
const PAGE_SIZE_4_0: Field = Field::new(mkc::LOG_PAGE_SIZE.offset() + 1, mkc::LOG_PAGE_SIZE.width() - 1);
const PAGE_SIZE_5: Field = Field::new(mkc::LOG_PAGE_SIZE.offset(), 1);

/// Fields by the mask bit that changes them.
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

/// Why a UMR work request is not carried out. The key is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UmrError {
    /// The work request ends in the middle of what it should hold.
    #[error("the work request is too short")]
    Short,
    /// A field of the context that cannot be changed.
    #[error("the mask {0:#x} has fields that cannot be changed")]
    Mask(u64),
    /// There is no such key.
    #[error("no such key")]
    NoKey,
    /// The key is not made to be changed like this.
    #[error("the key allows no UMR")]
    NotAllowed,
    /// The key or the new domain is not the queue pair's.
    #[error("key of another protection domain or queue pair")]
    Domain,
    /// The key is free and should not be.
    #[error("the key is free")]
    Free,
    /// The key is in use and should not be.
    #[error("the key is not free")]
    InUse,
    /// The key or the device has no space for these translations.
    #[error("no space for the translations")]
    NoSpace,
    /// The list of translations is shorter than it should be.
    #[error("translations are missing")]
    List,
}

/// Where a request's translations are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum List {
    /// There are none.
    None,
    /// In the work request.
    Inline(Vec<u8>),
    /// In memory, to be read by the device.
    Memory {
        /// Local key.
        key: u32,
        /// First address.
        address: u64,
        /// Length in bytes.
        length: u64,
    },
}

/// A UMR work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Umr {
    /// The key it is about; its variant counts only where the request brings no new one.
    pub key: u32,
    /// The translations.
    pub list: List,
    pub(super) flags: u64,
    pub(super) mask: u64,
    pub(super) octword: u64,
    pub(super) octwords: u64,
    pub(super) context: [u8; mkc::BYTES],
}

/// Who sends a UMR work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Issuer {
    /// The queue pair's protection domain.
    pub pd: u32,
    /// The queue pair.
    pub qpn: u32,
    /// The queue pair is the driver's own for this purpose: it may change keys of every domain, and their domain.
    pub driver: bool,
}

impl Umr {
    /// Reads a work request: `key` is the immediate of its control segment, `body` what follows that segment.
    ///
    /// # Errors
    ///
    /// [`UmrError::Short`] and [`UmrError::Mask`].
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
        let octword = if flags & OFFSET != 0 {
            (wqe_umr_ctrl_seg::XLT_OFFSET_47_16.get(control) << 16) | wqe_umr_ctrl_seg::XLT_OFFSET.get(control)
        } else {
            0
        };
        let length = octwords * 16;
        let list = if octwords == 0 {
            List::None
        } else if flags & INLINE != 0 {
            // Not truncated: 16 bits of 16 bytes.
            List::Inline(rest.get(..length as usize).ok_or(UmrError::Short)?.to_vec())
        } else {
            let data = rest.get(..wqe_data_seg::BYTES).ok_or(UmrError::Short)?;
            let have = match wqe_data_seg::BYTE_COUNT.get(data) {
                0 => WHOLE,
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

    /// The access by which the translations are read, where they are in memory.
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
    /// Carries out a UMR work request. `memory` is what [`Umr::list_access`] read, and empty where that is nothing.
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
        if foreign && !issuer.driver || other_qp {
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
        let end = umr.octword.checked_add(umr.octwords).ok_or(UmrError::NoSpace)?;
        if umr.octwords != 0 && end > context.octwords {
            return Err(UmrError::NoSpace);
        }
        let after = words - key.translations.words() + key.translations.words_with(umr.octword, list.len());
        if after > limit {
            return Err(UmrError::NoSpace);
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

    /// What a failed read of a request's translations makes of the request.
    pub fn list_fault(fault: Fault) -> UmrError {
        match fault {
            Fault::Domain => UmrError::Domain,
            _ => UmrError::List,
        }
    }
}

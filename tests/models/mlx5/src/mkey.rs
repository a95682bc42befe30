// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory keys (mkeys): access rights and address translation of an `lkey` or `rkey`.
//!
//! The mkey context (`mkc` in the headers) holds the protection domain, the access rights and the access mode. The
//! access mode is one of: bus addresses (PA), pages of one size (MTT), pages of one size of other mkeys (KSM), or a
//! list of variable-size entries of other mkeys (KLM). As in hardware, the adapter keeps the translations. The driver
//! writes them by CREATE_MKEY or by UMR work requests (`umr.rs`). An access to a page that is not present raises a page
//! fault (`fault.rs`), which the driver resolves and resumes.
//!
//! This module moves no payload: [`Mkeys::resolve`] translates an access to ranges of bus addresses.

mod context;
mod fault;
#[cfg(test)]
mod tests;
mod translation;
mod umr;

use std::collections::BTreeMap;

use p2pmem_ib::{Access, Fault, Rights};
use p2pmem_vfio_user::Extent;

use super::layout::ifc::{create_mkey_in, mkc, query_mkey_out};
use super::table::Table;
use context::{AccessMode, Context};
pub use fault::{PageFault, Resumed};
use translation::{Translation, Translations};
pub use umr::{Issuer, List, Umr, UmrError};

/// Index of the first mkey. Drivers treat lower indexes as reserved.
const FIRST: u32 = 16;
/// Key of the KLM entry that is the control segment of a stride block list (`MLX5_STRIDE_BLOCK_OP` in `qp.h`).
const STRIDE_BLOCK_OP: u32 = 0x400;
/// Maximum depth of mkeys that refer to other mkeys.
const MAX_DEPTH: u32 = 5;
/// Maximum number of bus address ranges of one access, and maximum number of translations that one access may read. The
/// limits bound the cost of an mkey that consists of single bytes.
const MAX_EXTENTS: usize = 1 << 20;
const MAX_STEPS: u32 = 1 << 22;

/// Maximum numbers of mkeys and translations of an adapter.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Number of mkeys.
    pub keys: u32,
    /// Translations of all mkeys together, in units of 8 bytes.
    pub words: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            keys: 1 << 20,
            words: 1 << 25,
        }
    }
}

/// Reason why an mkey command is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MkeyError {
    /// The command is shorter than its length fields state.
    #[error("command shorter than its length fields state")]
    Short,
    /// A parameter is not supported.
    #[error("{0}")]
    Parameter(&'static str),
    /// The mkey does not exist.
    #[error("mkey does not exist")]
    NoKey,
    /// The adapter has too many mkeys or translations.
    #[error("too many mkeys or translations")]
    Full,
}

/// A memory key.
#[derive(Debug)]
struct Key {
    /// Context as the driver wrote it, for QUERY_MKEY and for changes of single fields.
    image: [u8; mkc::BYTES],
    context: Context,
    translations: Translations,
    /// DESTROY_MKEY is in progress: no new access may begin.
    retired: bool,
}

/// The memory keys of an adapter.
#[derive(Debug)]
pub struct Mkeys {
    keys: Table<Key>,
    limits: Limits,
    words: u64,
    faults: fault::PageFaults,
    /// Transfers in flight by their number, each with the indexes of the mkeys that its access was translated by.
    /// Numbers ascend.
    transfers: BTreeMap<u64, Vec<u32>>,
    next_transfer: u64,
}

/// Rights, protection domain and queue pair that an access is checked against.
#[derive(Clone, Copy)]
struct Accessor {
    rights: Rights,
    pd: u32,
    qpn: u32,
}

/// Reason why a translation stops early.
enum WalkError {
    Fault(Fault),
    /// The pages at these addresses of mkey `key` are not present.
    NotPresent {
        key: u32,
        address: u64,
        len: u64,
    },
}

impl From<Fault> for WalkError {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl Mkeys {
    /// Creates an empty table.
    pub fn new(limits: Limits) -> Self {
        Self {
            keys: Table::new(FIRST, limits.keys),
            limits,
            words: 0,
            faults: fault::PageFaults::default(),
            transfers: BTreeMap::new(),
            next_transfer: 0,
        }
    }

    /// Executes a CREATE_MKEY command and returns the index of the mkey. `command` is the whole input.
    ///
    /// # Errors
    ///
    /// See [`MkeyError`].
    pub fn create(&mut self, command: &[u8]) -> Result<u32, MkeyError> {
        if command.len() < create_mkey_in::BYTES {
            return Err(MkeyError::Short);
        }
        if create_mkey_in::MKEY_UMEM_VALID.is_set(command) || create_mkey_in::DATA_DIRECT.is_set(command) {
            return Err(MkeyError::Parameter(
                "translations in a umem or of another device are not supported",
            ));
        }
        let mut image = [0; mkc::BYTES];
        image.copy_from_slice(create_mkey_in::MEMORY_KEY_MKEY_ENTRY.of(command));
        let context = Context::read(&image);
        context.check()?;
        let octwords = create_mkey_in::TRANSLATIONS_OCTWORD_ACTUAL_SIZE.get(command);
        let list = create_mkey_in::KLM_PAS_MTT.of(command);
        let list = usize::try_from(octwords * 16)
            .ok()
            .and_then(|bytes| list.get(..bytes))
            .ok_or(MkeyError::Short)?;
        if octwords > context.octwords {
            return Err(MkeyError::Parameter("more translations than the mkey declares"));
        }
        let present = !create_mkey_in::PG_ACCESS.is_set(command);
        let mut translations = Translations::new(context.mode);
        let need = translations.words_with(0, list.len());
        if self.words + need > self.limits.words {
            return Err(MkeyError::Full);
        }
        translations.write(0, list, present);
        let key = Key {
            image,
            context,
            translations,
            retired: false,
        };
        let index = self.keys.add(key).ok_or(MkeyError::Full)?;
        self.words += need;
        Ok(index)
    }

    /// Makes all new accesses and changes of the mkey fail. The caller destroys the mkey when [`Mkeys::in_flight`]
    /// returns false.
    ///
    /// # Errors
    ///
    /// [`MkeyError::NoKey`].
    pub fn retire(&mut self, index: u32) -> Result<(), MkeyError> {
        self.keys.get_mut(index).ok_or(MkeyError::NoKey)?.retired = true;
        Ok(())
    }

    /// Destroys the mkey with this index.
    ///
    /// # Errors
    ///
    /// [`MkeyError::NoKey`].
    pub fn destroy(&mut self, index: u32) -> Result<(), MkeyError> {
        let key = self.keys.remove(index).ok_or(MkeyError::NoKey)?;
        self.words -= key.translations.words();
        Ok(())
    }

    /// Writes the output of QUERY_MKEY, except for its status.
    ///
    /// # Errors
    ///
    /// [`MkeyError::NoKey`].
    pub fn query(&self, index: u32, output: &mut [u8]) -> Result<(), MkeyError> {
        let key = self.keys.get(index).ok_or(MkeyError::NoKey)?;
        let entry = query_mkey_out::MEMORY_KEY_MKEY_ENTRY.of_mut(output);
        if entry.len() == key.image.len() {
            entry.copy_from_slice(&key.image);
        }
        for (i, part) in [
            query_mkey_out::BSF0_KLM0_PAS_MTT0_1,
            query_mkey_out::BSF1_KLM1_PAS_MTT2_3,
        ]
        .into_iter()
        .enumerate()
        {
            for (byte, value) in part.of_mut(output).iter_mut().zip(key.translations.octword(i)) {
                *byte = value;
            }
        }
        Ok(())
    }

    /// Returns the number of mkeys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns whether there are no mkeys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the size of all translations, in units of 8 bytes.
    pub fn words(&self) -> u64 {
        self.words
    }

    /// Returns the mkey if it exists, its variant matches, and it is neither free nor about to be destroyed.
    fn live(&self, key: u32) -> Result<&Key, Fault> {
        let found = self.keys.get(key >> 8).ok_or(Fault::Key)?;
        if found.retired || found.context.free || found.context.variant != (key & 0xff) as u8 {
            return Err(Fault::Key);
        }
        Ok(found)
    }

    /// Returns the mkey if the accessor may use the given range of it.
    fn permitted(&self, key: u32, accessor: Accessor, address: u64, len: u64) -> Result<&Key, Fault> {
        let found = self.live(key)?;
        let context = &found.context;
        if context.pd != accessor.pd || !context.any_qp() && context.qpn != accessor.qpn {
            return Err(Fault::Domain);
        }
        if !context.allows(accessor.rights) {
            return Err(Fault::Rights);
        }
        if !context.contains(address, len) {
            return Err(Fault::Bounds);
        }
        Ok(found)
    }

    /// Returns the protection domain of a live mkey.
    pub fn pd(&self, key: u32) -> Option<u32> {
        self.live(key).ok().map(|found| found.context.pd)
    }

    /// Checks rights, protection domain and bounds of an access. Ignores the translations.
    ///
    /// # Errors
    ///
    /// See [`Fault`]; never a page fault.
    pub fn check(&self, access: &Access) -> Result<(), Fault> {
        let accessor = Accessor {
            rights: access.rights,
            pd: access.pd,
            qpn: access.qpn,
        };
        self.permitted(access.key, accessor, access.address, access.length)
            .map(drop)
    }

    /// Translates an access to bus addresses and appends them to `extents`; adjacent ranges are merged. On an error,
    /// `extents` is unchanged.
    ///
    /// # Errors
    ///
    /// See [`Fault`]. For a page that is not present, [`Mkeys::take_faults`] returns the fault unless the same fault is
    /// already pending.
    pub fn resolve(&mut self, access: &Access, extents: &mut Vec<Extent>) -> Result<(), Fault> {
        self.translate(access, extents).map(drop)
    }

    /// Translates an access like [`Mkeys::resolve`], and records a transfer that is in flight until the caller passes
    /// the returned number to [`Mkeys::end_transfer`]. The mkeys may change in the meantime.
    ///
    /// # Errors
    ///
    /// As [`Mkeys::resolve`].
    pub fn begin_transfer(&mut self, access: &Access, extents: &mut Vec<Extent>) -> Result<u64, Fault> {
        let keys = self.translate(access, extents)?;
        let number = self.next_transfer;
        self.next_transfer += 1;
        self.transfers.insert(number, keys);
        Ok(number)
    }

    /// Ends the transfer with this number.
    pub fn end_transfer(&mut self, number: u64) {
        self.transfers.remove(&number);
    }

    /// Returns the number that the next transfer gets.
    pub fn next_transfer(&self) -> u64 {
        self.next_transfer
    }

    /// Returns whether a transfer that uses the mkey with this index and has a number below `before` is in flight.
    pub fn in_flight(&self, index: u32, before: u64) -> bool {
        self.transfers.range(..before).any(|(_, keys)| keys.contains(&index))
    }

    /// Appends the bus addresses of an access to `extents`, and returns the indexes of all mkeys that were used.
    fn translate(&mut self, access: &Access, extents: &mut Vec<Extent>) -> Result<Vec<u32>, Fault> {
        let before = extents.len();
        let accessor = Accessor {
            rights: access.rights,
            pd: access.pd,
            qpn: access.qpn,
        };
        let mut out = Extents {
            list: extents,
            limit: before + MAX_EXTENTS,
            steps: MAX_STEPS,
            keys: Vec::new(),
        };
        let result = self.walk(access.key, accessor, access.address, access.length, 0, &mut out);
        let keys = out.keys;
        result.map(|()| keys).map_err(|stop| {
            extents.truncate(before);
            match stop {
                WalkError::Fault(fault) => fault,
                WalkError::NotPresent { key, address, len } => self.faults.raise(key, address, len),
            }
        })
    }

    fn walk(
        &self,
        key: u32,
        accessor: Accessor,
        address: u64,
        len: u64,
        depth: u32,
        out: &mut Extents<'_>,
    ) -> Result<(), WalkError> {
        if depth >= MAX_DEPTH {
            return Err(Fault::Bounds.into());
        }
        let found = self.permitted(key, accessor, address, len)?;
        out.add_key(key >> 8);
        let inner = Accessor {
            // A KLM or KSM mkey uses the mkeys it refers to with local rights.
            rights: match accessor.rights {
                Rights::LocalRead | Rights::RemoteRead => Rights::LocalRead,
                Rights::LocalWrite | Rights::RemoteWrite | Rights::RemoteAtomic => Rights::LocalWrite,
            },
            ..accessor
        };
        let mut done = 0;
        while done < len {
            out.step()?;
            let at = address.wrapping_add(done);
            let translation = found.translations.find(&found.context, at, len - done);
            match translation.ok_or(Fault::Bounds)? {
                Translation::Bus { address, run, flags } if flags.allows(accessor.rights) => {
                    out.push(address, run)?;
                    done += run;
                }
                Translation::Bus { run, .. } | Translation::NotPresent { run } => {
                    // Report all consecutive missing pages, so that the driver resolves them with one fault.
                    let mut missing = run;
                    while missing < len - done && out.step().is_ok() {
                        let at = at.wrapping_add(missing);
                        match found.translations.find(&found.context, at, len - done - missing) {
                            Some(Translation::Bus { flags, run, .. }) if !flags.allows(accessor.rights) => {
                                missing += run
                            }
                            Some(Translation::NotPresent { run }) => missing += run,
                            _ => break,
                        }
                    }
                    return Err(WalkError::NotPresent {
                        key,
                        address: at,
                        len: missing,
                    });
                }
                Translation::Mkey { key, address, run } => {
                    self.walk(key, inner, address, run, depth + 1, out)?;
                    done += run;
                }
            }
        }
        Ok(())
    }

    /// Sets an mkey free, as requested by the remote side's SEND with invalidate.
    ///
    /// # Errors
    ///
    /// The mkey does not exist, is of another domain or queue pair, or does not permit remote invalidation.
    pub fn invalidate(&mut self, key: u32, pd: u32, qpn: u32) -> Result<(), Fault> {
        let context = &self.live(key)?.context;
        if context.pd != pd || !context.any_qp() && context.qpn != qpn {
            return Err(Fault::Domain);
        }
        if !context.remote_invalidate {
            return Err(Fault::Rights);
        }
        if let Some(found) = self.keys.get_mut(key >> 8) {
            mkc::FREE.set(&mut found.image, 1_u32);
            found.context = Context::read(&found.image);
        }
        Ok(())
    }
}

/// Bus addresses of one access; adjacent ranges are merged.
struct Extents<'a> {
    list: &'a mut Vec<Extent>,
    limit: usize,
    /// Number of translations that may still be read.
    steps: u32,
    /// Indexes of the mkeys that were used, without duplicates.
    keys: Vec<u32>,
}

impl Extents<'_> {
    fn add_key(&mut self, index: u32) {
        // The list is short: an access has one mkey, and a KLM or KSM mkey usually refers to few.
        if !self.keys.contains(&index) {
            self.keys.push(index);
        }
    }

    /// Counts one translation. Fails when the access has read too many.
    fn step(&mut self) -> Result<(), Fault> {
        self.steps = self.steps.checked_sub(1).ok_or(Fault::Bounds)?;
        Ok(())
    }

    fn push(&mut self, address: u64, len: u64) -> Result<(), Fault> {
        // A range that wraps around is no range of bus addresses.
        let end = address.checked_add(len - 1).ok_or(Fault::Bus)?;
        let full = self.list.len() >= self.limit;
        match self.list.last_mut() {
            Some(last) if last.address.checked_add(last.len) == Some(address) && end > last.address => last.len += len,
            _ if full => return Err(Fault::Bounds),
            _ => self.list.push(Extent { address, len }),
        }
        Ok(())
    }
}

impl Context {
    /// Refuses contexts that this model does not support.
    fn check(&self) -> Result<(), MkeyError> {
        if self.mode == AccessMode::Other {
            return Err(MkeyError::Parameter("access mode not supported"));
        }
        if self.signature {
            return Err(MkeyError::Parameter("signatures (bsf_en) not supported"));
        }
        Ok(())
    }
}

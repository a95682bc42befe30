// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory keys: the memory of a local or remote key, and the access that the key allows.
//!
//! A key's context (`mkc` in the headers) has the key's owner, its access rights, and the layout of its address space: bus
//! addresses (PA), pages of one size (MTT), pages of one size in other keys (KSM), or consecutive ranges of other keys
//! (KLM). The translations are stored here, as the hardware stores them in its own memory; the driver sets them with
//! CREATE_MKEY or with UMR work requests (`umr.rs`). An access to a page that is not present causes a page fault, which the
//! driver has to resolve (`fault.rs`).
//!
//! This module moves no payload: [`Mkeys::resolve`] translates an access into ranges of bus addresses.

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
use context::{Context, Mode};
pub use fault::{PageFault, Resumed};
use translation::{Target, Translations};
pub use umr::{Issuer, List, Umr, UmrError};

/// Number of the first key; those below are taken for reserved ones by the driver.
const FIRST: u32 = 16;
/// Key of a KLM entry that is no piece but says how those after it repeat.
const REPEAT: u32 = 0x400;
/// How many keys deep an address may be translated.
const MAX_DEPTH: u32 = 5;
/// Most ranges that one access may fall into, and most translations it may take to find them; who builds a key out of
/// single bytes gets no further.
const MAX_EXTENTS: usize = 1 << 20;
const MAX_STEPS: u32 = 1 << 22;

/// The maximum number of keys and translations of a device.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Keys.
    pub keys: u32,
    /// Translations of all keys together, in units of 8 bytes.
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

/// Why a command about a key is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The command is shorter than what it announces.
    #[error("the command is too short")]
    Short,
    /// A parameter that no key can have here.
    #[error("{0}")]
    Parameter(&'static str),
    /// There is no such key.
    #[error("no such key")]
    NoKey,
    /// Too many keys, or too many translations.
    #[error("no space for another key")]
    Full,
}

/// A key.
#[derive(Debug)]
struct Key {
    /// The context as the driver wrote it, for QUERY_MKEY and changes of single fields.
    image: [u8; mkc::BYTES],
    context: Context,
    translations: Translations,
    /// It is about to be destroyed: no access begins any more.
    retired: bool,
}

/// The memory keys of a device.
#[derive(Debug)]
pub struct Mkeys {
    keys: Table<Key>,
    limits: Limits,
    words: u64,
    faults: fault::Faults,
    /// Accesses that have their bus addresses and whose transfer has not ended, by number, with the indexes of the keys
    /// that they were translated by. Numbers ascend.
    flights: BTreeMap<u64, Vec<u32>>,
    next_flight: u64,
}

/// In whose name an address is translated.
#[derive(Clone, Copy)]
struct Who {
    rights: Rights,
    pd: u32,
    qpn: u32,
}

/// What ends a translation early.
enum Stop {
    Fault(Fault),
    /// Nothing is present at these addresses of this key.
    Absent {
        key: u32,
        address: u64,
        len: u64,
    },
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl Mkeys {
    /// No keys yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            keys: Table::new(FIRST, limits.keys),
            limits,
            words: 0,
            faults: fault::Faults::default(),
            flights: BTreeMap::new(),
            next_flight: 0,
        }
    }

    /// Carries out a CREATE_MKEY command, given as a whole, and returns the key's index.
    ///
    /// # Errors
    ///
    /// See [`Refusal`].
    pub fn create(&mut self, command: &[u8]) -> Result<u32, Refusal> {
        if command.len() < create_mkey_in::BYTES {
            return Err(Refusal::Short);
        }
        if create_mkey_in::MKEY_UMEM_VALID.is_set(command) || create_mkey_in::DATA_DIRECT.is_set(command) {
            return Err(Refusal::Parameter(
                "translations in another device's or process's memory",
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
            .ok_or(Refusal::Short)?;
        if octwords > context.octwords {
            return Err(Refusal::Parameter("more translations than the key has space for"));
        }
        let present = !create_mkey_in::PG_ACCESS.is_set(command);
        let mut translations = Translations::new(context.mode);
        let need = translations.words_with(0, list.len());
        if self.words + need > self.limits.words {
            return Err(Refusal::Full);
        }
        translations.write(0, list, present);
        let key = Key {
            image,
            context,
            translations,
            retired: false,
        };
        let index = self.keys.add(key).ok_or(Refusal::Full)?;
        self.words += need;
        Ok(index)
    }

    /// Refuses new accesses by the key with this index, and changes of the key. The caller still has to destroy the key, once
    /// [`Mkeys::in_flight`] returns that no access is in flight.
    ///
    /// # Errors
    ///
    /// [`Refusal::NoKey`].
    pub fn retire(&mut self, index: u32) -> Result<(), Refusal> {
        self.keys.get_mut(index).ok_or(Refusal::NoKey)?.retired = true;
        Ok(())
    }

    /// Destroys the key with this index.
    ///
    /// # Errors
    ///
    /// [`Refusal::NoKey`].
    pub fn destroy(&mut self, index: u32) -> Result<(), Refusal> {
        let key = self.keys.remove(index).ok_or(Refusal::NoKey)?;
        self.words -= key.translations.words();
        Ok(())
    }

    /// Fills the output of QUERY_MKEY in, but for its status.
    ///
    /// # Errors
    ///
    /// [`Refusal::NoKey`].
    pub fn query(&self, index: u32, output: &mut [u8]) -> Result<(), Refusal> {
        let key = self.keys.get(index).ok_or(Refusal::NoKey)?;
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

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Translations of all keys, in units of 8 bytes.
    pub fn words(&self) -> u64 {
        self.words
    }

    /// The key itself, if it has this number and variant and is not free.
    fn live(&self, key: u32) -> Result<&Key, Fault> {
        let found = self.keys.get(key >> 8).ok_or(Fault::Key)?;
        if found.retired || found.context.free || found.context.variant != (key & 0xff) as u8 {
            return Err(Fault::Key);
        }
        Ok(found)
    }

    /// The key, if it may be used like this for a range that lies in it.
    fn permitted(&self, key: u32, who: Who, address: u64, len: u64) -> Result<&Key, Fault> {
        let found = self.live(key)?;
        let context = &found.context;
        if context.pd != who.pd || !context.any_qp() && context.qpn != who.qpn {
            return Err(Fault::Domain);
        }
        if !context.allows(who.rights) {
            return Err(Fault::Rights);
        }
        if !context.holds(address, len) {
            return Err(Fault::Bounds);
        }
        Ok(found)
    }

    /// The protection domain of a key, if there is such a key.
    pub fn domain(&self, key: u32) -> Option<u32> {
        self.live(key).ok().map(|found| found.context.pd)
    }

    /// Whether a key allows an access, without looking at its translations.
    ///
    /// # Errors
    ///
    /// See [`Fault`]; never a page fault.
    pub fn check(&self, access: &Access) -> Result<(), Fault> {
        let who = Who {
            rights: access.rights,
            pd: access.pd,
            qpn: access.qpn,
        };
        self.permitted(access.key, who, access.address, access.length).map(drop)
    }

    /// Finds the bus addresses of an access and appends them to `extents`, neighbours joined. On an error, nothing is
    /// appended.
    ///
    /// # Errors
    ///
    /// See [`Fault`]. For a page that is not present, the fault is among [`Mkeys::take_faults`] unless the same one is
    /// pending already.
    pub fn resolve(&mut self, access: &Access, extents: &mut Vec<Extent>) -> Result<(), Fault> {
        self.translate(access, extents).map(drop)
    }

    /// As [`Mkeys::resolve`], of an access whose transfer runs while the keys may change: until [`Mkeys::land`] is called
    /// with the number returned, it is in flight.
    ///
    /// # Errors
    ///
    /// As [`Mkeys::resolve`].
    pub fn depart(&mut self, access: &Access, extents: &mut Vec<Extent>) -> Result<u64, Fault> {
        let keys = self.translate(access, extents)?;
        let number = self.next_flight;
        self.next_flight += 1;
        self.flights.insert(number, keys);
        Ok(number)
    }

    /// The transfer of an access has ended.
    pub fn land(&mut self, number: u64) {
        self.flights.remove(&number);
    }

    /// The number that the next access to depart gets.
    pub fn next_flight(&self) -> u64 {
        self.next_flight
    }

    /// Whether accesses by the key with this index are in flight that departed before number `before`.
    pub fn in_flight(&self, index: u32, before: u64) -> bool {
        self.flights.range(..before).any(|(_, keys)| keys.contains(&index))
    }

    /// Finds an access's bus addresses, and the indexes of the keys that lead to them.
    fn translate(&mut self, access: &Access, extents: &mut Vec<Extent>) -> Result<Vec<u32>, Fault> {
        let before = extents.len();
        let who = Who {
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
        let result = self.walk(access.key, who, access.address, access.length, 0, &mut out);
        let keys = out.keys;
        result.map(|()| keys).map_err(|stop| {
            extents.truncate(before);
            match stop {
                Stop::Fault(fault) => fault,
                Stop::Absent { key, address, len } => self.faults.raise(key, address, len),
            }
        })
    }

    fn walk(&self, key: u32, who: Who, address: u64, len: u64, depth: u32, out: &mut Extents<'_>) -> Result<(), Stop> {
        if depth >= MAX_DEPTH {
            return Err(Fault::Bounds.into());
        }
        let found = self.permitted(key, who, address, len)?;
        out.through(key >> 8);
        let inner = Who {
            // A key made of others uses them as its owner would.
            rights: match who.rights {
                Rights::LocalRead | Rights::RemoteRead => Rights::LocalRead,
                Rights::LocalWrite | Rights::RemoteWrite | Rights::RemoteAtomic => Rights::LocalWrite,
            },
            ..who
        };
        let mut done = 0;
        while done < len {
            out.step()?;
            let at = address.wrapping_add(done);
            let piece = found.translations.find(&found.context, at, len - done);
            match piece.ok_or(Fault::Bounds)? {
                Target::Bus { address, run, present } if present.allows(who.rights) => {
                    out.push(address, run)?;
                    done += run;
                }
                Target::Bus { run, .. } | Target::Absent { run } => {
                    // All that is missing in a row, so that the driver repairs it at once.
                    let mut missing = run;
                    while missing < len - done && out.step().is_ok() {
                        let at = at.wrapping_add(missing);
                        match found.translations.find(&found.context, at, len - done - missing) {
                            Some(Target::Bus { present, run, .. }) if !present.allows(who.rights) => missing += run,
                            Some(Target::Absent { run }) => missing += run,
                            _ => break,
                        }
                    }
                    return Err(Stop::Absent {
                        key,
                        address: at,
                        len: missing,
                    });
                }
                Target::Key { key, address, run } => {
                    self.walk(key, inner, address, run, depth + 1, out)?;
                    done += run;
                }
            }
        }
        Ok(())
    }

    /// Makes a key free because the remote side requested that with a message.
    ///
    /// # Errors
    ///
    /// The key does not exist, belongs to another protection domain, or does not allow remote invalidation.
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

/// Bus addresses, neighbours joined.
struct Extents<'a> {
    list: &'a mut Vec<Extent>,
    limit: usize,
    /// Translations that may still be looked at.
    steps: u32,
    /// Indexes of the keys that the access passes through, each once.
    keys: Vec<u32>,
}

impl Extents<'_> {
    fn through(&mut self, index: u32) {
        // A short list: an access has one key, and a key made of others usually has few.
        if !self.keys.contains(&index) {
            self.keys.push(index);
        }
    }

    /// Looks at another translation.
    fn step(&mut self) -> Result<(), Fault> {
        self.steps = self.steps.checked_sub(1).ok_or(Fault::Bounds)?;
        Ok(())
    }

    fn push(&mut self, address: u64, len: u64) -> Result<(), Fault> {
        // Addresses that wrap around are no bus addresses.
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
    /// Refuses what no key here can be.
    fn check(&self) -> Result<(), Refusal> {
        if self.mode == Mode::Other {
            return Err(Refusal::Parameter("an access mode that this device does not have"));
        }
        if self.signature {
            return Err(Refusal::Parameter("signatures, which this device does not have"));
        }
        Ok(())
    }
}

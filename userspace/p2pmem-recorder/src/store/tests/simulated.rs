// SPDX-License-Identifier: MIT OR Apache-2.0

//! Drives whose caches lose what was not made durable, and that fail where a test wants it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::store::system::{Entry, System};

pub(crate) const EIO: i32 = 5;
pub(crate) const ENOSPC: i32 = 28;
const SECTOR: usize = 512;

/// What happens at one operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    /// The number of the operation, from 1.
    pub(crate) at: u64,
    pub(crate) errno: i32,
    /// Whether the operation has an effect although it fails.
    pub(crate) effect: bool,
    /// Whether the power is off from then on.
    pub(crate) power_off: bool,
}

/// Bugs of a drive or a file system, which tests must find.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bugs {
    pub(crate) ignores_flush: bool,
    /// Writes from this byte of a file on stay volatile.
    pub(crate) ignores_durable_from: Option<usize>,
    pub(crate) ignores_sync_folder: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Node {
    Folder,
    File(usize),
}

type Tree = BTreeMap<PathBuf, Node>;

/// A change of the tree that is not durable.
#[derive(Debug, Clone)]
enum Change {
    Create(PathBuf, Node),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

impl Change {
    fn paths(&self) -> Vec<&Path> {
        match self {
            Self::Create(path, _) | Self::Remove(path) => vec![path],
            Self::Rename(from, to) => vec![from, to],
        }
    }

    /// Whether one change can only be durable with the other: one has a path in the other's.
    fn depends_on(&self, other: &Self) -> bool {
        let related = |a: &Path, b: &Path| a.starts_with(b) || b.starts_with(a);
        self.paths().iter().any(|a| other.paths().iter().any(|b| related(a, b)))
    }

    fn is_in(&self, folder: &Path) -> bool {
        self.paths().iter().any(|path| path.parent() == Some(folder))
    }

    fn apply(&self, tree: &mut Tree) {
        match self {
            Self::Create(path, node) => drop(tree.insert(path.clone(), *node)),
            Self::Remove(path) => drop(tree.remove(path)),
            Self::Rename(from, to) => {
                let below =
                    tree.range::<Path, _>((std::ops::Bound::Included(from.as_path()), std::ops::Bound::Unbounded));
                let moved: Vec<PathBuf> = below
                    .map(|(path, _)| path.clone())
                    .take_while(|path| path.starts_with(from))
                    .collect();
                for path in moved {
                    if let (Some(node), Ok(rest)) = (tree.remove(&path), path.strip_prefix(from)) {
                        let path = if rest.as_os_str().is_empty() {
                            to.clone()
                        } else {
                            to.join(rest)
                        };
                        tree.insert(path, node);
                    }
                }
            }
        }
    }
}

#[derive(Default)]
struct Content {
    durable: Vec<u8>,
    /// Writes in the drive's volatile cache.
    cached: Vec<(usize, Vec<u8>)>,
}

#[derive(Default)]
struct Machine {
    tree: Tree,
    durable: Tree,
    changes: Vec<Change>,
    files: Vec<Content>,
    locks: BTreeSet<PathBuf>,
    operations: u64,
    fault: Option<Fault>,
    fault_happened: bool,
    counts_reads: bool,
    is_suspended: bool,
    is_off: bool,
    needs_flush: bool,
    bugs: Bugs,
    numbers: u64,
    space: Option<u64>,
}

/// A machine with drives. Clones are the same machine.
#[derive(Clone)]
pub(crate) struct Simulated(Arc<Mutex<Machine>>);

pub(crate) struct SimulatedFile {
    machine: Simulated,
    number: usize,
}

pub(crate) struct SimulatedLock {
    machine: Simulated,
    path: PathBuf,
}

impl Drop for SimulatedLock {
    fn drop(&mut self) {
        self.machine.get().locks.remove(&self.path);
    }
}

fn error(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

/// A generator of numbers for choices of a test (xorshift).
pub(crate) struct Choices(u64);

impl Choices {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % below
    }
}

impl Machine {
    /// Counts an operation that changes something. `Ok(false)` lets it have its effect and fail.
    fn step(&mut self) -> io::Result<bool> {
        if self.is_off {
            return Err(error(EIO));
        }
        self.operations += 1;
        match self.fault {
            Some(fault) if fault.at == self.operations => {
                self.is_off = fault.power_off;
                self.fault_happened = true;
                if fault.effect {
                    Ok(false)
                } else {
                    Err(error(fault.errno))
                }
            }
            _ => Ok(true),
        }
    }

    fn result(&self, succeeds: bool) -> io::Result<()> {
        match (succeeds, self.fault) {
            (false, Some(fault)) => Err(error(fault.errno)),
            _ => Ok(()),
        }
    }

    /// Counts an operation that only reads.
    fn reads(&mut self) -> io::Result<()> {
        if !self.counts_reads || self.is_suspended {
            return if self.is_off { Err(error(EIO)) } else { Ok(()) };
        }
        let succeeds = self.step()?;
        self.result(succeeds)
    }

    fn change(&mut self, change: Change) -> io::Result<()> {
        let succeeds = self.step()?;
        change.apply(&mut self.tree);
        self.changes.push(change);
        self.result(succeeds)
    }

    fn node(&self, path: &Path) -> io::Result<Node> {
        self.tree
            .get(path)
            .copied()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Returns the entries below a folder. A tree is sorted by the components of paths.
    fn below<'a>(&'a self, folder: &'a Path) -> impl Iterator<Item = (&'a PathBuf, &'a Node)> {
        let from = (std::ops::Bound::Excluded(folder), std::ops::Bound::Unbounded);
        self.tree
            .range::<Path, _>(from)
            .take_while(move |(path, _)| path.starts_with(folder))
    }

    fn check_absent(&self, path: &Path) -> io::Result<()> {
        if self.tree.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        match path.parent().and_then(|parent| self.tree.get(parent)) {
            Some(Node::Folder) => Ok(()),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn write(&mut self, number: usize, offset: usize, bytes: &[u8], durable: bool) -> io::Result<()> {
        let succeeds = self.step()?;
        let content = &mut self.files[number];
        assert!(offset % SECTOR == 0 && bytes.len() % SECTOR == 0 && offset + bytes.len() <= content.durable.len());
        let ignores = self.bugs.ignores_durable_from.is_some_and(|from| offset >= from);
        if durable && succeeds && !ignores {
            content.durable[offset..offset + bytes.len()].copy_from_slice(bytes);
            // An older write in the cache does not come back.
            for (at, cached) in &mut content.cached {
                let (from, to) = (offset.max(*at), (offset + bytes.len()).min(*at + cached.len()));
                if from < to {
                    cached[from - *at..to - *at].copy_from_slice(&bytes[from - offset..to - offset]);
                }
            }
        } else {
            content.cached.push((offset, bytes.to_vec()));
        }
        self.result(succeeds)
    }
}

impl Simulated {
    /// A machine with the folders `drives`. If `needs_flush` is set, payload is volatile until a flush.
    pub(crate) fn new(drives: &[PathBuf], needs_flush: bool, bugs: Bugs) -> Self {
        let mut machine = Machine {
            needs_flush,
            bugs,
            ..Machine::default()
        };
        for drive in drives {
            machine.tree.insert(drive.clone(), Node::Folder);
        }
        machine.durable = machine.tree.clone();
        Self(Arc::new(Mutex::new(machine)))
    }

    fn get(&self) -> MutexGuard<'_, Machine> {
        self.0.lock().unwrap()
    }

    pub(crate) fn operations(&self) -> u64 {
        self.get().operations
    }

    pub(crate) fn count_reads(&self) {
        self.get().counts_reads = true;
    }

    /// Sets the fault. Its operation counts from now on.
    pub(crate) fn set_fault(&self, fault: Option<Fault>) {
        let mut machine = self.get();
        machine.operations = 0;
        machine.fault = fault;
        machine.fault_happened = false;
    }

    pub(crate) fn fault_happened(&self) -> bool {
        self.get().fault_happened
    }

    pub(crate) fn is_off(&self) -> bool {
        self.get().is_off
    }

    /// Lets reads neither count nor fail, for the checks of a test.
    pub(crate) fn suspend_faults(&self, suspend: bool) {
        self.get().is_suspended = suspend;
    }

    /// Limits the bytes of files that can be created.
    pub(crate) fn set_space(&self, bytes: Option<u64>) {
        self.get().space = bytes;
    }

    /// Cuts the power, and switches the machine on again. Of what was not durable, some part is there: `choices` decides
    /// which sectors and which changes of folders.
    pub(crate) fn power_cycle(&self, choices: &mut Choices) {
        let mut machine = self.get();
        let machine = &mut *machine;
        // All, nothing, or any part.
        let mode = choices.next(4);
        let mut keeps = || match mode {
            0 => false,
            1 => true,
            _ => choices.next(2) == 0,
        };
        let mut dropped: Vec<Change> = Vec::new();
        for change in std::mem::take(&mut machine.changes) {
            if !dropped.iter().any(|other| change.depends_on(other)) && keeps() {
                change.apply(&mut machine.durable);
            } else {
                dropped.push(change);
            }
        }
        machine.tree = machine.durable.clone();
        for file in &mut machine.files {
            for (offset, bytes) in std::mem::take(&mut file.cached) {
                for (index, sector) in bytes.chunks(SECTOR).enumerate() {
                    if keeps() {
                        let at = offset + index * SECTOR;
                        file.durable[at..at + SECTOR].copy_from_slice(sector);
                    }
                }
            }
        }
        machine.locks.clear();
        machine.is_off = false;
        machine.fault = None;
        machine.operations = 0;
    }

    /// Overwrites bytes of a file, durably, as a failing medium would.
    pub(crate) fn damage(&self, path: &Path, offset: usize, bytes: &[u8]) {
        let mut machine = self.get();
        let Ok(Node::File(number)) = machine.node(path) else {
            panic!("{} is no file", path.display())
        };
        machine.files[number].durable[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Returns the paths of all files below a folder.
    pub(crate) fn files_below(&self, folder: &Path) -> Vec<PathBuf> {
        let machine = self.get();
        let files = machine.below(folder).filter(|(_, node)| **node != Node::Folder);
        files.map(|(path, _)| path.clone()).collect()
    }
}

impl SimulatedFile {
    /// Writes payload, as a program or a NIC does.
    pub(crate) fn write_payload(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut machine = self.machine.get();
        let durable = !machine.needs_flush;
        machine.write(self.number, offset as usize, bytes, durable)
    }

    pub(crate) fn read_payload(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.machine.read(self, offset, bytes)
    }
}

impl System for Simulated {
    type File = SimulatedFile;
    type Lock = SimulatedLock;

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        let mut machine = self.get();
        machine.check_absent(path)?;
        machine.change(Change::Create(path.to_owned(), Node::Folder))
    }

    fn create_file(&self, path: &Path, size: u64) -> io::Result<()> {
        let mut machine = self.get();
        machine.check_absent(path)?;
        if let Some(space) = &mut machine.space {
            *space = space.checked_sub(size).ok_or_else(|| error(ENOSPC))?;
        }
        let number = machine.files.len();
        machine.files.push(Content {
            durable: vec![0; size as usize],
            cached: Vec::new(),
        });
        machine.change(Change::Create(path.to_owned(), Node::File(number)))
    }

    fn open(&self, path: &Path) -> io::Result<SimulatedFile> {
        let mut machine = self.get();
        machine.reads()?;
        match machine.node(path)? {
            Node::Folder => Err(io::ErrorKind::IsADirectory.into()),
            Node::File(number) => Ok(SimulatedFile {
                machine: self.clone(),
                number,
            }),
        }
    }

    fn size(&self, file: &SimulatedFile) -> io::Result<u64> {
        let mut machine = self.get();
        machine.reads()?;
        Ok(machine.files[file.number].durable.len() as u64)
    }

    fn write_durable(&self, file: &SimulatedFile, offset: u64, pages: &[u8]) -> io::Result<()> {
        self.get().write(file.number, offset as usize, pages, true)
    }

    fn read(&self, file: &SimulatedFile, offset: u64, pages: &mut [u8]) -> io::Result<()> {
        let mut machine = self.get();
        machine.reads()?;
        let content = &machine.files[file.number];
        let start = offset as usize;
        let end = start + pages.len();
        let bytes = content.durable.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?;
        pages.copy_from_slice(bytes);
        for (at, bytes) in &content.cached {
            let (from, to) = (start.max(*at), end.min(at + bytes.len()));
            if from < to {
                pages[from - start..to - start].copy_from_slice(&bytes[from - at..to - at]);
            }
        }
        Ok(())
    }

    fn flush(&self, file: &SimulatedFile) -> io::Result<()> {
        let mut machine = self.get();
        let result = machine.step();
        let ignores = machine.bugs.ignores_flush;
        let content = &mut machine.files[file.number];
        match result {
            Ok(true) if ignores => Ok(()),
            Ok(true) => {
                for (at, bytes) in std::mem::take(&mut content.cached) {
                    content.durable[at..at + bytes.len()].copy_from_slice(&bytes);
                }
                Ok(())
            }
            // The writes stay volatile.
            Ok(false) => machine.result(false),
            // A failed flush can lose the writes, and the next one succeeds.
            Err(error) => {
                if !machine.is_off {
                    machine.files[file.number].cached.clear();
                }
                Err(error)
            }
        }
    }

    fn payload_needs_flush(&self) -> bool {
        self.get().needs_flush
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<Entry>> {
        let mut machine = self.get();
        machine.reads()?;
        if machine.node(folder)? != Node::Folder {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let inside = machine.below(folder).filter(|(path, _)| path.parent() == Some(folder));
        let entries = inside.map(|(path, node)| Entry {
            name: path.file_name().unwrap().to_string_lossy().into_owned(),
            is_folder: *node == Node::Folder,
        });
        Ok(entries.collect())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut machine = self.get();
        machine.node(from)?;
        machine.check_absent(to)?;
        machine.change(Change::Rename(from.to_owned(), to.to_owned()))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut machine = self.get();
        assert!(matches!(machine.node(path)?, Node::File(_)), "{}", path.display());
        machine.change(Change::Remove(path.to_owned()))
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        let mut machine = self.get();
        machine.node(path)?;
        if machine.below(path).next().is_some() {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        machine.change(Change::Remove(path.to_owned()))
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        let mut machine = self.get();
        let machine = &mut *machine;
        let succeeds = machine.step()?;
        if succeeds && !machine.bugs.ignores_sync_folder {
            let mut needed: Vec<Change> = Vec::new();
            let mut others = Vec::new();
            for change in std::mem::take(&mut machine.changes).into_iter().rev() {
                if change.is_in(folder) || needed.iter().any(|later| later.depends_on(&change)) {
                    needed.push(change);
                } else {
                    others.push(change);
                }
            }
            for change in needed.iter().rev() {
                change.apply(&mut machine.durable);
            }
            others.reverse();
            machine.changes = others;
        }
        machine.result(succeeds)
    }

    fn lock(&self, path: &Path) -> io::Result<SimulatedLock> {
        let mut machine = self.get();
        machine.reads()?;
        machine.node(path)?;
        if !machine.locks.insert(path.to_owned()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(SimulatedLock {
            machine: self.clone(),
            path: path.to_owned(),
        })
    }

    fn random(&self) -> io::Result<u64> {
        let mut machine = self.get();
        machine.numbers += 1;
        Ok(machine.numbers)
    }
}

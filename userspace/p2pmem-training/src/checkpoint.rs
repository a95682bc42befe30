// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checkpoints: the [state](crate::state) of a training in a file with two slots, or on a block device.
//!
//! A checkpoint replaces the older of both slots, and is on the drive before the next one begins. Its header has checksums of itself and
//! of the parameters. So if the power fails while a checkpoint is written, that slot is not valid and the other one is.
//!
//! The memory of an accelerator is written by direct I/O from a mapping: the drive reads the accelerator's BAR. Host memory is
//! written through the page cache.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use p2pmem::DirectOptions;
use p2pmem_verbs::Span;

use crate::settings::MAX_PARAMETERS;
use crate::state::{Header, Layout, PAGE};

/// Number of slots.
const SLOTS: u64 = 2;
/// Most bytes that [`show`] reads: two slots of the largest network.
const LARGEST: u64 = 4 << 20;
const _: () = assert!(SLOTS * (2 * PAGE + 4 * MAX_PARAMETERS as u64) <= LARGEST);

/// The checkpoints of a training, and the memory that has its state at the start.
#[derive(Debug)]
pub struct Checkpoints {
    path: PathBuf,
    file: File,
    span: Span,
    layout: Layout,
    fingerprint: [u8; 32],
    /// The slot of the next checkpoint.
    next: u64,
}

impl Checkpoints {
    /// Opens the file or block device, or creates the file.
    ///
    /// # Errors
    ///
    /// The file cannot be opened for direct I/O.
    pub fn open(path: &Path, span: &Span, layout: Layout, fingerprint: [u8; 32]) -> Result<Self> {
        let file = match span.mapping() {
            Some(_) => DirectOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .open(path)
                .context("use a file on a drive whose file system supports direct I/O")?,
            None => File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path)
                .with_context(|| format!("opening the checkpoint {}", path.display()))?,
        };
        Ok(Self {
            path: path.to_owned(),
            file,
            span: span.clone(),
            layout,
            fingerprint,
            next: 0,
        })
    }

    fn slot_at(&self, slot: u64) -> u64 {
        slot * self.layout.state()
    }

    /// Reads a slot into the memory. Returns its header if the slot has a valid checkpoint.
    fn read(&self, slot: u64) -> Result<Option<Header>> {
        let len = self.layout.state() as usize;
        let mut state = vec![0; len];
        let at = self.slot_at(slot);
        match self.span.mapping() {
            Some(mapping) => {
                let count = mapping.read_from(&self.file, at, 0..len);
                if count.with_context(|| format!("reading {}", self.path.display()))? < len {
                    return Ok(None);
                }
                self.span.try_read(0, &mut state)?;
            }
            None => {
                match self.file.read_exact_at(&mut state, at) {
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
                    result => result.with_context(|| format!("reading {}", self.path.display()))?,
                }
                self.span.try_write(0, &state)?;
            }
        }
        Ok(Header::decode_state(&state))
    }

    /// Reads the newest valid checkpoint into the memory. Returns `None` if there is none; the memory then has no defined content.
    ///
    /// # Errors
    ///
    /// The checkpoint is of another training, or the file cannot be read.
    pub fn load(&mut self) -> Result<Option<Header>> {
        let mut newest: Option<(u64, Header)> = None;
        for slot in 0..SLOTS {
            let header = self.read(slot)?;
            let is_newer = |header: &Header| {
                newest
                    .as_ref()
                    .is_none_or(|(_, other)| header.iteration > other.iteration)
            };
            newest = header.filter(is_newer).map(|header| (slot, header)).or(newest);
        }
        let Some((slot, header)) = newest else {
            return Ok(None);
        };
        ensure!(
            header.fingerprint == self.fingerprint,
            "{} is the checkpoint of another training: start with the settings, the algorithm and the number of ranks that it was made \
             with, or specify another file",
            self.path.display()
        );
        self.next = (slot + 1) % SLOTS;
        if slot + 1 < SLOTS {
            // The other slot has replaced it in the memory.
            let again = self.read(slot)?;
            ensure!(
                again.as_ref() == Some(&header),
                "{} was changed while it was read: does another training use it?",
                self.path.display()
            );
        }
        Ok(Some(header))
    }

    /// Writes the state that the memory has, with its header, and waits until it is on the drive.
    ///
    /// # Errors
    ///
    /// The drive is full or failed, or does not accept the memory.
    pub fn save(&mut self) -> Result<()> {
        let what = || format!("writing the checkpoint {}", self.path.display());
        let len = self.layout.state() as usize;
        let at = self.slot_at(self.next);
        match self.span.mapping() {
            Some(mapping) => mapping.write_to(&self.file, at, 0..len).with_context(what)?,
            None => {
                let mut state = vec![0; len];
                self.span.try_read(0, &mut state)?;
                self.file.write_all_at(&state, at).with_context(what)?;
            }
        }
        self.file.sync_data().with_context(what)?;
        self.next = (self.next + 1) % SLOTS;
        Ok(())
    }
}

/// Returns the header of the newest valid checkpoint of a file; `None` if it has none.
///
/// # Errors
///
/// The file cannot be read.
pub fn show(path: &Path) -> Result<Option<Header>> {
    let what = || format!("reading the checkpoint {}", path.display());
    let mut bytes = Vec::new();
    let file = File::open(path).with_context(what)?;
    file.take(LARGEST).read_to_end(&mut bytes).with_context(what)?;
    let first = Header::decode_state(&bytes);
    // If the first slot is torn, only its own header can say where the second one begins; so each page is tried.
    let others = bytes.chunks(PAGE as usize).enumerate().skip(1);
    let second = others
        .filter(|(_, page)| Header::decode(page).is_some())
        .find_map(|(number, _)| Header::decode_state(&bytes[number * PAGE as usize..]));
    Ok([first, second]
        .into_iter()
        .flatten()
        .max_by_key(|header| header.iteration))
}

/// The interval at which [`await_iteration`] reads the header.
const INTERVAL: Duration = Duration::from_millis(10);

/// Waits until the first slot of a file has a checkpoint of this iteration or a later one, and returns its header. Only the header is
/// read, so this takes little of the processor on which a training runs.
///
/// # Errors
///
/// The file cannot be read, or no such checkpoint was written within the limit.
pub fn await_iteration(path: &Path, iteration: u64, limit: Duration) -> Result<Header> {
    let what = || format!("reading the checkpoint {}", path.display());
    let deadline = Instant::now() + limit;
    loop {
        let mut page = Vec::new();
        let file = File::open(path).with_context(what)?;
        file.take(PAGE).read_to_end(&mut page).with_context(what)?;
        let header = Header::decode(&page).filter(|header| header.iteration >= iteration);
        if let Some(header) = header {
            return Ok(header);
        }
        ensure!(
            Instant::now() < deadline,
            "{} had no checkpoint of iteration {iteration} within {limit:?}",
            path.display()
        );
        std::thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{digest, PAGE};
    use p2pmem::fake::Fake;
    use p2pmem::Request;

    const PARAMETERS: usize = 3000;

    fn layout() -> Layout {
        Layout::new(PARAMETERS)
    }

    /// Host memory, and memory of an accelerator.
    fn spans() -> [Span; 2] {
        let bytes = layout().payload().next_multiple_of(PAGE);
        let device = Fake::example().device();
        let mapping = device.alloc(&Request::new(bytes)).unwrap().map().unwrap();
        [Span::host(bytes as usize).unwrap(), Span::buffer(mapping)]
    }

    fn fill(span: &Span, iteration: u64) -> Header {
        let parameters: Vec<u8> = (0..4 * PARAMETERS as u64)
            .map(|i| (i ^ (31 * iteration)) as u8)
            .collect();
        let header = Header {
            iteration,
            parameters: PARAMETERS as u64,
            fingerprint: [1; 32],
            digest: digest(&parameters),
            losses: vec![iteration as f64],
        };
        span.write(0, &header.encode());
        span.write(PAGE as usize, &parameters);
        header
    }

    fn open(path: &Path, span: &Span) -> Checkpoints {
        Checkpoints::open(path, span, layout(), [1; 32]).unwrap()
    }

    /// Returns what a new process finds: the header, and whether the memory has this state.
    fn found(path: &Path, span: &Span) -> Option<Header> {
        span.write(0, &vec![0xee; layout().payload() as usize]);
        let header = open(path, span).load().unwrap();
        assert_eq!(show(path).unwrap(), header);
        if let Some(header) = &header {
            let mut state = vec![0; layout().state() as usize];
            span.read(0, &mut state);
            assert_eq!(Header::decode_state(&state).as_ref(), Some(header));
        }
        header
    }

    fn file() -> (tempfile::TempDir, PathBuf) {
        // Not in /tmp, which may have no direct I/O.
        let program = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let path = folder.path().join("checkpoint");
        (folder, path)
    }

    #[test]
    fn the_newest_checkpoint_is_found() {
        for span in spans() {
            let (_folder, path) = file();
            let mut checkpoints = open(&path, &span);
            assert_eq!(checkpoints.load().unwrap(), None);
            for iteration in 1..=5 {
                let header = fill(&span, iteration);
                checkpoints.save().unwrap();
                assert_eq!(found(&path, &span), Some(header));
            }
            assert_eq!(path.metadata().unwrap().len(), 2 * layout().state());
        }
    }

    #[test]
    fn an_iteration_is_awaited() {
        let [span, _] = spans();
        let (_folder, path) = file();
        let mut checkpoints = open(&path, &span);
        let soon = Duration::from_millis(1);
        assert!(await_iteration(&path, 1, soon).is_err());
        // The second one is in the other slot.
        for iteration in [5, 10, 15] {
            fill(&span, iteration);
            checkpoints.save().unwrap();
        }
        assert_eq!(await_iteration(&path, 11, soon).unwrap().iteration, 15);
        let error = await_iteration(&path, 16, soon).unwrap_err().to_string();
        assert!(error.contains("no checkpoint of iteration 16 within 1ms"), "{error}");
        let waiter = std::thread::spawn({
            let path = path.clone();
            move || await_iteration(&path, 25, Duration::from_secs(60))
        });
        for iteration in [20, 25] {
            fill(&span, iteration);
            checkpoints.save().unwrap();
        }
        assert_eq!(waiter.join().unwrap().unwrap().iteration, 25);
    }

    /// A checkpoint of which only a part is on the drive is not used, and does not replace the one before.
    #[test]
    fn torn_checkpoints_are_not_used() {
        for span in spans() {
            let (_folder, path) = file();
            let mut checkpoints = open(&path, &span);
            let (mut before, mut old) = (None, vec![0; 2 * layout().state() as usize]);
            for iteration in 1..=3 {
                let header = fill(&span, iteration);
                checkpoints.save().unwrap();
                let mut new = std::fs::read(&path).unwrap();
                new.resize(old.len(), 0);
                let slot = layout().state() * ((iteration - 1) % 2);
                // Any of the blocks of the slot has not been written.
                for block in 0..layout().state() / PAGE {
                    let at = (slot + block * PAGE) as usize..(slot + (block + 1) * PAGE) as usize;
                    let mut torn = new.clone();
                    torn[at.clone()].copy_from_slice(&old[at]);
                    std::fs::write(&path, &torn).unwrap();
                    assert_eq!(
                        found(&path, &span),
                        before,
                        "checkpoint {iteration} without block {block}"
                    );
                }
                std::fs::write(&path, &new).unwrap();
                (before, old) = (Some(header), new);
            }
            // The next process replaces the older one.
            let mut next = open(&path, &span);
            let newest = next.load().unwrap();
            assert_eq!(newest, before);
            let header = fill(&span, 9);
            next.save().unwrap();
            assert_eq!(found(&path, &span), Some(header));
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!(
                Header::decode_state(&bytes),
                newest,
                "the newest one of the process before is still there"
            );
        }
    }

    #[test]
    fn the_checkpoint_of_another_training_is_refused() {
        let [span, _] = spans();
        let (_folder, path) = file();
        fill(&span, 1);
        open(&path, &span).save().unwrap();
        let error = Checkpoints::open(&path, &span, layout(), [2; 32])
            .unwrap()
            .load()
            .unwrap_err();
        assert!(error.to_string().contains("checkpoint of another training"), "{error}");
    }
}

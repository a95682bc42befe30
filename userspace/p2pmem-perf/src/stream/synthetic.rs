// SPDX-License-Identifier: MIT OR Apache-2.0

//! The built-in source: a thread generates arrays of int8 samples.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{bail, Context, Result};
use p2pmem_payload::memory::{Memory, MemoryOptions};
use p2pmem_verbs::{Domain, Span};

use super::frame;
use super::pace::{Pace, Step, SHORTEST};
use super::protocol::Layout;
use super::source::{Next, Source, SourceFrame, SourceOptions, Totals};
use super::REVOKED;

/// The queue between the producer and the sender. Its entries are the slots of the memory.
#[derive(Debug, Default)]
struct Fifo {
    /// Frames that the producer has completed.
    produced: u64,
    /// Frames that the sender has released.
    released: u64,
    dropped: u64,
    /// Sequence numbers of the frames that the sender has not taken.
    sequences: VecDeque<u64>,
    /// The producer has to end.
    stop: bool,
    /// Why the producer has ended by itself.
    failure: Option<String>,
}

#[derive(Debug, Default)]
struct Shared {
    fifo: Mutex<Fifo>,
    changed: Condvar,
}

impl Shared {
    /// Locks the queue. A panic of the producer does not make it inconsistent: each change is an assignment.
    fn lock(&self) -> MutexGuard<'_, Fifo> {
        self.fifo.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A producer of frames in any memory that the processor can write to.
struct Producer {
    span: Span,
    options: SourceOptions,
    shared: Arc<Shared>,
}

impl Producer {
    /// Produces frames until it is stopped, or the memory is revoked.
    fn run(&self) {
        if let Err(error) = self.produce() {
            self.shared.lock().failure = Some(error.to_string());
        }
    }

    fn produce(&self) -> p2pmem::Result<()> {
        let SourceOptions { layout, rate, seed } = self.options;
        let chunk = layout.chunk;
        let pace = Pace { rate, chunk };
        let start = Instant::now();
        let mut sequence = 0;
        loop {
            let Some(number) = self.next(&pace, &mut sequence, start) else {
                return Ok(());
            };
            // Offsets and sizes are inside the memory, which is mapped.
            frame::write(&self.span, layout.slot(number) as usize, chunk as usize, seed, sequence)?;
            let mut fifo = self.shared.lock();
            fifo.produced += 1;
            fifo.sequences.push_back(sequence);
            sequence += 1;
            self.shared.changed.notify_all();
        }
    }

    /// Waits until the next frame is due and has a free slot. Returns the number of the frame among those that were not
    /// dropped; `None` if the producer has to end.
    fn next(&self, pace: &Pace, sequence: &mut u64, start: Instant) -> Option<u64> {
        let slots = u64::from(self.options.layout.slots);
        let mut fifo = self.shared.lock();
        loop {
            if fifo.stop {
                return None;
            }
            let full = fifo.produced - fifo.released >= slots;
            fifo = match pace.step(*sequence, start.elapsed(), full) {
                Step::Produce => return Some(fifo.produced),
                Step::Drop(frames) => {
                    *sequence += frames;
                    fifo.dropped += frames;
                    // A wait also if frames are due more often than this thread looks: the sender needs the lock.
                    let waited = self.shared.changed.wait_timeout(fifo, SHORTEST);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                Step::Wait(time) => {
                    let waited = self.shared.changed.wait_timeout(fifo, time);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                Step::WaitForMemory => {
                    let waited = self.shared.changed.wait(fifo);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }
}

/// The sender's end of the queue, and the thread at the other end.
#[derive(Debug)]
struct Consumer {
    shared: Arc<Shared>,
    layout: Layout,
    /// Frames that the sender has taken.
    taken: u64,
    thread: Option<JoinHandle<()>>,
}

impl Consumer {
    fn start(span: Span, options: SourceOptions) -> Result<Self> {
        let shared = Arc::<Shared>::default();
        let producer = Producer {
            span,
            options,
            shared: Arc::clone(&shared),
        };
        let thread = std::thread::Builder::new().name("synthetic".into());
        let thread = thread
            .spawn(move || producer.run())
            .context("starting the thread that generates samples")?;
        Ok(Self {
            shared,
            layout: options.layout,
            taken: 0,
            thread: Some(thread),
        })
    }

    fn next(&mut self) -> Result<Next> {
        let mut fifo = self.shared.lock();
        if let Some(sequence) = fifo.sequences.pop_front() {
            let at = self.layout.slot(self.taken);
            self.taken += 1;
            return Ok(Next::Frame(SourceFrame { at, sequence }));
        }
        match &fifo.failure {
            Some(failure) => bail!("{REVOKED} Generating samples failed: {failure}"),
            None => Ok(Next::NotYet),
        }
    }

    fn release(&mut self, frames: u64) {
        let mut fifo = self.shared.lock();
        fifo.released += frames;
        self.shared.changed.notify_all();
    }

    fn stop(&mut self) -> Totals {
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // The panic hook has printed why a thread panicked.
            let _ = thread.join();
        }
        let fifo = self.shared.lock();
        Totals {
            produced: fifo.produced,
            dropped: fifo.dropped,
        }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Generated samples in host memory or in a p2pmem buffer.
pub struct Synthetic {
    // Fields are dropped in this order: the thread ends before its memory.
    consumer: Option<Consumer>,
    memory: Memory,
    options: SourceOptions,
}

impl Synthetic {
    /// Allocates and registers memory.
    ///
    /// # Errors
    ///
    /// No such memory is available, or the NIC rejects it.
    pub fn open(memory: MemoryOptions<'_>, domain: &Arc<Domain>, options: &SourceOptions) -> Result<Self> {
        let memory = Memory::new(memory, domain, options.layout.bytes())?;
        Ok(Self {
            consumer: None,
            memory,
            options: *options,
        })
    }

    fn consumer(&mut self) -> Result<&mut Consumer> {
        self.consumer.as_mut().context("the source was not started")
    }
}

impl Source for Synthetic {
    fn name(&self) -> &'static str {
        "synthetic"
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn layout(&self) -> Layout {
        self.options.layout
    }

    fn start(&mut self) -> Result<()> {
        self.consumer = Some(Consumer::start(self.memory.span().clone(), self.options)?);
        Ok(())
    }

    fn next(&mut self) -> Result<Next> {
        self.consumer()?.next()
    }

    fn release(&mut self, frames: u64) -> Result<()> {
        self.consumer()?.release(frames);
        Ok(())
    }

    fn stop(&mut self) -> Result<Totals> {
        Ok(self.consumer.as_mut().map(Consumer::stop).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { chunk: 4096, slots: 3 };

    fn start(rate: Option<u64>) -> (Span, Consumer) {
        let span = Span::host(LAYOUT.bytes() as usize).unwrap();
        let options = SourceOptions {
            layout: LAYOUT,
            rate,
            seed: 5,
        };
        let consumer = Consumer::start(span.clone(), options).unwrap();
        (span, consumer)
    }

    /// Waits for the next frame.
    fn next(consumer: &mut Consumer) -> SourceFrame {
        loop {
            match consumer.next().unwrap() {
                Next::Frame(frame) => return frame,
                Next::NotYet => {
                    let fifo = consumer.shared.lock();
                    if fifo.sequences.is_empty() && fifo.failure.is_none() {
                        drop(consumer.shared.changed.wait(fifo).unwrap());
                    }
                }
                Next::End => panic!("the source has no end"),
            }
        }
    }

    #[test]
    fn frames_are_in_order_and_do_not_change_until_their_release() {
        let (span, mut consumer) = start(None);
        for round in 0..20 {
            let frames: Vec<_> = (0..3).map(|_| next(&mut consumer)).collect();
            // All slots are taken, so the producer waits.
            assert_eq!(consumer.next().unwrap(), Next::NotYet);
            for (frame, number) in frames.iter().zip(3 * round..) {
                assert_eq!((frame.sequence, frame.at), (number, LAYOUT.slot(number)));
                let checked = frame::check(&span, frame.at as usize, 4096).unwrap().unwrap();
                assert!(checked.crc && checked.samples && checked.sequence == number);
            }
            consumer.release(3);
        }
        let totals = consumer.stop();
        assert!(
            (60..=63).contains(&totals.produced) && totals.dropped == 0,
            "{totals:?}"
        );
        // A second stop changes nothing.
        assert_eq!(consumer.stop(), totals);
    }

    #[test]
    fn late_readers_lose_frames_that_are_counted() {
        // So many that the producer drops frames at once.
        let (_, mut consumer) = start(Some(1 << 40));
        {
            let mut fifo = consumer.shared.lock();
            while fifo.dropped == 0 {
                consumer.shared.changed.notify_all();
                drop(fifo);
                std::thread::yield_now();
                fifo = consumer.shared.lock();
            }
        }
        let first: Vec<_> = (0..3).map(|_| next(&mut consumer).sequence).collect();
        assert_eq!(first, [0, 1, 2]);
        consumer.release(3);
        let after = next(&mut consumer).sequence;
        assert!(after > 3, "{after}");
        let totals = consumer.stop();
        assert!(totals.dropped >= after - 3, "{totals:?}");
    }

    #[test]
    fn a_producer_that_waits_can_be_stopped() {
        for rate in [None, Some(1)] {
            let (_, mut consumer) = start(rate);
            let totals = consumer.stop();
            assert!(totals.produced <= 3 && totals.dropped == 0, "{totals:?}");
        }
    }
}

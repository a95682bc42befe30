// SPDX-License-Identifier: MIT OR Apache-2.0

//! The stream of the emulated FPGA as a source of `p2pmem-perf stream`. The slots of the source are the FPGA's ring, in a
//! p2pmem buffer in the FPGA's BAR. The NIC reads the frames there, and no processor copies them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use p2pmem_fpga_regs::Status;
use p2pmem_fpga_regs::driver::{Error, Fpga, FrameMemory, Stream, StreamOptions};
use p2pmem_payload::memory::{Memory, MemoryOptions};
use p2pmem_perf::stream::protocol::Layout;
use p2pmem_perf::stream::source::{Next, Source, SourceFrame, SourceOptions, Totals};
use p2pmem_verbs::{Domain, Span};

/// Time between two reads of the status register, which traps.
const STATUS_INTERVAL: Duration = Duration::from_millis(100);

/// A buffer in the FPGA's BAR, by offsets in this BAR.
#[derive(Debug)]
struct Frames {
    span: Span,
    /// Offset of the buffer.
    offset: u64,
}

impl FrameMemory for Frames {
    fn load64(&self, offset: u64) -> Result<u64, Error> {
        let at = offset.checked_sub(self.offset).and_then(|at| usize::try_from(at).ok());
        let inside = |at: &usize| at.checked_add(8).is_some_and(|end| end <= self.span.len());
        let at = at.filter(inside).ok_or(Error::OutOfBounds)?;
        let mut word = [0; 8];
        let read = self.span.try_read(at, &mut word);
        read.map_err(|error| Error::Memory(error.to_string()))?;
        Ok(u64::from_le_bytes(word))
    }
}

/// The FPGA as a source.
pub struct FpgaSource {
    // Fields are dropped in this order: the device stops before its memory is freed.
    stream: Option<Stream<Frames>>,
    memory: Memory,
    /// The address of the FPGA.
    address: String,
    options: StreamOptions,
    layout: Layout,
    looked: Instant,
    totals: Option<Totals>,
}

impl FpgaSource {
    /// Allocates and registers memory of the FPGA near the NIC. `memory` has the kind of memory of
    /// FPGAs.
    ///
    /// # Errors
    ///
    /// No FPGA is published or has so much memory, or the NIC rejects the memory.
    pub fn open(memory: MemoryOptions<'_>, domain: &Arc<Domain>, source: &SourceOptions) -> Result<Self> {
        let layout = source.layout;
        let memory = Memory::new(memory, domain, layout.bytes())?;
        let address = memory
            .provider()
            .context("the buffer has no provider")?
            .addr
            .to_string();
        let offset = memory
            .bar_offset()
            .context("the place of the buffer in the FPGA's memory is unknown")?;
        let options = StreamOptions {
            offset,
            frame_size: u32::try_from(layout.chunk)?,
            frames: layout.slots,
            rate: source.rate.unwrap_or(0),
            seed: source.seed,
            limit: 0,
        };
        Ok(Self {
            stream: None,
            memory,
            address,
            options,
            layout,
            looked: Instant::now(),
            totals: None,
        })
    }

    fn stream(&mut self) -> Result<&mut Stream<Frames>> {
        self.stream.as_mut().context("the source was not started")
    }
}

impl Source for FpgaSource {
    fn name(&self) -> &'static str {
        "fpga"
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn layout(&self) -> Layout {
        self.layout
    }

    fn start(&mut self) -> Result<()> {
        let address = &self.address;
        let frames = Frames {
            span: self.memory.span().clone(),
            offset: self.options.offset,
        };
        let fpga = Fpga::open(address).with_context(|| format!("opening the FPGA {address}"))?;
        let stream = Stream::start(fpga, frames, self.options);
        self.stream = Some(stream.with_context(|| format!("starting the FPGA {address}"))?);
        Ok(())
    }

    fn next(&mut self) -> Result<Next> {
        let first = self.options.offset;
        if let Some(frame) = self.stream()?.poll()? {
            return Ok(Next::Frame(SourceFrame {
                at: frame.offset - first,
                sequence: frame.header.sequence,
            }));
        }
        if self.looked.elapsed() >= STATUS_INTERVAL {
            let status = self.stream()?.fpga().status()?;
            if status != Status::Running {
                bail!("the FPGA has stopped its stream: {status}");
            }
            self.looked = Instant::now();
        }
        Ok(Next::NotYet)
    }

    fn release(&mut self, frames: u64) -> Result<()> {
        Ok(self.stream()?.release(frames)?)
    }

    fn stop(&mut self) -> Result<Totals> {
        if let Some(totals) = self.totals {
            return Ok(totals);
        }
        let Some(stream) = &mut self.stream else {
            return Ok(Totals::default());
        };
        stream.stop()?;
        let (frames, dropped) = stream.fpga().frames()?;
        let totals = Totals {
            produced: frames - dropped,
            dropped,
        };
        self.totals = Some(totals);
        Ok(totals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem_fpga_regs::frame::{HEADER_SIZE, Header, fill_samples};
    use p2pmem_perf::stream::frame;

    const CHUNK: usize = 100 << 10;

    /// Returns a frame as the FPGA writes it.
    fn frame_of_the_device(sequence: u64, seed: u64) -> Vec<u8> {
        let mut samples = vec![0; CHUNK - HEADER_SIZE];
        fill_samples(seed, sequence, 0, &mut samples);
        let header = Header {
            position: sequence + 1,
            sequence,
            time: sequence * samples.len() as u64,
            payload: samples.len() as u32,
            crc32c: crc32c::crc32c(&samples),
            seed,
        };
        [&header.to_bytes()[..], &samples].concat()
    }

    #[test]
    fn the_device_and_p2pmem_perf_have_the_same_frames() {
        let span = Span::host(CHUNK).unwrap();
        for (sequence, seed) in [(0, 1), (5, 9), (1 << 33, u64::MAX)] {
            frame::write(&span, 0, CHUNK, seed, sequence).unwrap();
            let mut found = vec![0; CHUNK];
            span.read(0, &mut found);
            assert!(found == frame_of_the_device(sequence, seed), "{sequence}");
            span.write(0, &frame_of_the_device(sequence, seed));
            let checked = frame::check(&span, 0, CHUNK).unwrap().unwrap();
            assert!(checked.crc && checked.samples && checked.sequence == sequence);
        }
    }

    #[test]
    fn accesses_outside_of_the_buffer_are_errors() {
        let frames = Frames {
            span: Span::host(4096).unwrap(),
            offset: 1 << 20,
        };
        assert_eq!(frames.load64((1 << 20) + 4088).unwrap(), 0);
        for offset in [0, (1 << 20) - 8, (1 << 20) + 4096, u64::MAX - 7] {
            assert!(matches!(frames.load64(offset), Err(Error::OutOfBounds)), "{offset:#x}");
        }
    }
}

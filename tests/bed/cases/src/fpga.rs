// SPDX-License-Identifier: MIT OR Apache-2.0

//! The stream of the FPGA, in a buffer that the module allocated near the NIC.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use p2pmem::{Buffer, BufferState, Client, Device, Mapping, Request};
use p2pmem_fpga_regs::Status;
use p2pmem_fpga_regs::driver::{self, Fpga, Frame, FrameMemory, Stream, StreamOptions};
use p2pmem_fpga_regs::frame::{HEADER_SIZE, fill_samples};

use super::in_time;
use super::limits::scaled;
use super::{Bed, Case};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "fpga-stream",
        about: "the FPGA streams to a buffer near the NIC: frames are complete and in order, late readers lose counted frames",
        topology: "nic",
        ruins: false,
        run: stream,
    },
    Case {
        name: "fpga-unbind",
        about: "the FPGA is unbound in the middle of a stream: the buffer is revoked, the stream stops, later memory is clear",
        topology: "nic",
        ruins: false,
        run: unbind,
    },
];

/// Bytes of a frame.
const FRAME: u32 = 64 << 10;
/// Slots of the ring.
const SLOTS: u32 = 8;
/// The time limit of each wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A buffer of the FPGA, mapped.
struct FpgaMemory {
    mapping: Mapping,
    buffer: Buffer,
    /// Offset in BAR2.
    offset: u64,
}

impl FpgaMemory {
    fn new(bed: &Bed, bytes: u64) -> Result<FpgaMemory> {
        let nic = bed.device("nic0")?.rdma.clone().context("nic0 has no RDMA device")?;
        let provider = bed.provider("fpga0")?.id;
        let request = Request::new(bytes).near([Client::resolve(&nic)?]).provider(provider);
        let buffer = Device::open()?.alloc(&request)?;
        Ok(FpgaMemory {
            mapping: buffer.map()?,
            offset: buffer.bar_offset().context("the buffer's place is unknown")?,
            buffer,
        })
    }

    fn at(&self, offset: u64) -> Result<usize, driver::Error> {
        let at = offset.checked_sub(self.offset).and_then(|at| usize::try_from(at).ok());
        at.ok_or(driver::Error::OutOfBounds)
    }

    /// Fails unless the samples of a frame are those of its sequence number.
    fn check(&self, frame: &Frame, options: &StreamOptions) -> Result<()> {
        let header = frame.header;
        let payload = options.frame_size as usize - HEADER_SIZE;
        ensure!(
            header.payload as usize == payload
                && header.seed == options.seed
                && header.time == header.sequence * payload as u64,
            "{frame:?}"
        );
        let (mut found, mut expected) = (vec![0_u8; payload], vec![0_u8; payload]);
        self.mapping
            .copy_to_slice(self.at(frame.offset)? + HEADER_SIZE, &mut found)?;
        fill_samples(header.seed, header.sequence, 0, &mut expected);
        ensure!(found == expected, "wrong samples in {frame:?}");
        Ok(())
    }
}

impl FrameMemory for FpgaMemory {
    fn load64(&self, offset: u64) -> Result<u64, driver::Error> {
        let word = self.mapping.read(self.at(offset)?);
        word.map(u64::from_le).map_err(|_| driver::Error::OutOfBounds)
    }
}

fn start(bed: &Bed, memory: FpgaMemory, rate: u64) -> Result<Stream<FpgaMemory>> {
    let options = StreamOptions {
        rate,
        seed: 7,
        ..StreamOptions::new(memory.offset, FRAME, SLOTS)
    };
    let fpga = Fpga::open(&bed.device("fpga0")?.bdf)?;
    Ok(Stream::start(fpga, memory, options)?)
}

fn stream(bed: &mut Bed) -> Result<()> {
    bed.publish("fpga0")?;
    let bytes = u64::from(FRAME) * u64::from(SLOTS);
    let memory = FpgaMemory::new(bed, bytes)?;
    let fpga = Fpga::open(&bed.device("fpga0")?.bdf)?;
    let outside = StreamOptions::new(fpga.memory_size() - u64::from(FRAME), FRAME, SLOTS);
    let refused = Stream::start(fpga, memory, outside).map(drop);
    ensure!(
        matches!(refused, Err(driver::Error::Stopped(Status::BadRing))),
        "a ring behind the memory: {refused:?}"
    );

    // Without a rate, the program sets the pace.
    let mut stream = start(bed, FpgaMemory::new(bed, bytes)?, 0)?;
    let options = *stream.options();
    for sequence in 0..4 * u64::from(SLOTS) {
        let frame = stream.wait(TIMEOUT)?;
        ensure!(frame.header.sequence == sequence, "frame {sequence} is {frame:?}");
        stream.memory().check(&frame, &options)?;
        stream.release(1)?;
    }
    ensure!(stream.fpga().frames()?.1 == 0, "dropped frames without a rate");
    let busy = start(bed, FpgaMemory::new(bed, bytes)?, 0).map(drop);
    ensure!(
        busy.as_ref()
            .is_err_and(|error| matches!(error.downcast_ref(), Some(driver::Error::Busy))),
        "a second stream: {busy:?}"
    );
    drop(stream);

    // With a rate, a program that reads nothing loses frames, and the device counts them.
    let mut stream = start(bed, FpgaMemory::new(bed, bytes)?, 64 << 20)?;
    let deadline = Instant::now() + scaled(TIMEOUT);
    while stream.fpga().frames()?.1 == 0 {
        in_time!(Instant::now() < deadline, "no frame was dropped within {TIMEOUT:?}");
    }
    for _ in 0..SLOTS {
        let frame = stream.wait(TIMEOUT)?;
        stream.memory().check(&frame, &options)?;
        stream.release(1)?;
    }
    // The first frame after the dropped ones.
    let frame = stream.wait(TIMEOUT)?;
    stream.memory().check(&frame, &options)?;
    stream.stop()?;
    let (frames, dropped) = stream.fpga().frames()?;
    ensure!(
        frame.header.sequence > u64::from(SLOTS) && dropped > 0 && frames > dropped,
        "{frame:?}, {frames} frames, {dropped} dropped"
    );
    drop(stream);
    bed.unpublish("fpga0")
}

fn unbind(bed: &mut Bed) -> Result<()> {
    bed.publish("fpga0")?;
    let bytes = u64::from(FRAME) * u64::from(SLOTS);
    let mut stream = start(bed, FpgaMemory::new(bed, bytes)?, 16 << 20)?;
    let options = *stream.options();
    for _ in 0..SLOTS {
        let frame = stream.wait(TIMEOUT)?;
        stream.memory().check(&frame, &options)?;
        stream.release(1)?;
    }
    bed.unbind("fpga0")?;
    let info = stream.memory().buffer.info()?;
    ensure!(info.state == BufferState::Gone, "{info:?}");
    // The device does not know that its memory was revoked. Its driver has to stop it.
    ensure!(
        stream.fpga().status()? == Status::Running,
        "the stream has stopped by itself"
    );
    stream.stop()?;
    ensure!(
        stream.fpga().status()? == Status::Idle,
        "the stream runs after its stop"
    );
    drop(stream);

    bed.publish("fpga0")?;
    let provider = bed.provider("fpga0")?;
    let memory = FpgaMemory::new(bed, provider.largest)?;
    let mut words = vec![0_u64; memory.mapping.len() / 8];
    memory.mapping.copy_to_slice(0, &mut words)?;
    let dirty = words.iter().filter(|word| **word != 0).count();
    ensure!(dirty == 0, "{dirty} words of the stream are in a new buffer");
    drop(memory);
    bed.unpublish("fpga0")
}

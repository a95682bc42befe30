// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checks this crate's operations on the first GPU: memory, stream memory operations, and both kernels.
//!
//! Prints a line for each check. The exit code is 0 if all checks passed.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use p2pmem_cuda_sys::{Condition, Cuda, Ended, Gpu, HostMemory, Memory, Operation, Place, Stream, StreamError};

const LIMIT: Duration = Duration::from_secs(10);
/// A wait that is not to be fulfilled.
const SHORT: Duration = Duration::from_millis(50);

type Result = std::result::Result<(), Box<dyn Error>>;
/// A check.
type Check = fn(&mut Bench) -> Result;

/// Fails with a description unless a condition holds.
fn ensure(holds: bool, what: impl Into<String>) -> Result {
    if holds {
        return Ok(());
    }
    Err(what.into().into())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu_selftest: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A GPU, a stream, and memory of both kinds.
struct Bench {
    gpu: Gpu,
    stream: Stream,
    host: Arc<HostMemory>,
}

impl Bench {
    fn at(&self, offset: usize) -> Place {
        Place {
            memory: Memory::Host(self.host.clone()),
            offset,
        }
    }
}

fn run() -> Result {
    let cuda = Cuda::load()?;
    let gpu = cuda.first_gpu()?;
    println!("GPU: {} at {}", gpu.name()?, gpu.pci_addr()?);
    ensure(gpu.supports_64_bit_stores()?, "streams of the GPU cannot store 64 bits")?;
    ensure(gpu.supports_nor()?, "streams of the GPU cannot wait with NOR")?;
    ensure(gpu.supports_kernels()?, "the GPU is older than compute capability 7.0")?;
    let mut bench = Bench {
        stream: gpu.stream()?,
        host: Arc::new(gpu.alloc_host(1 << 20)?),
        gpu,
    };
    let checks: [(&str, Check); 8] = [
        ("copies to and from GPU memory", copies),
        ("stream operations", enqueued),
        ("more stream operations than a batch has", batches),
        ("a list for the kernel", listed),
        ("waits for the host", waits),
        ("the limit of a wait", late),
        ("stopping a wait", stopped),
        ("adding words", added),
    ];
    for (what, check) in checks {
        check(&mut bench).map_err(|error| format!("{what}: {error}"))?;
        println!("ok: {what}");
    }
    refused(&mut bench)?;
    println!("ok: ranges outside of memory");
    stuck(&mut bench)?;
    println!("ok: a stream operation that is not fulfilled");
    Ok(())
}

fn copies(bench: &mut Bench) -> Result {
    let memory = bench.gpu.alloc(2 << 20)?;
    let data: Vec<u8> = (0..4096).map(|i| (i * 7) as u8).collect();
    memory.write(512, &data)?;
    let mut back = vec![0; data.len()];
    memory.read(512, &mut back)?;
    ensure(back == data, "the bytes differ")
}

/// Operations that store, wait for what they stored, and copy.
fn operations(bench: &Bench, base: usize, gpu: &Memory) -> Vec<Operation> {
    let in_gpu = Place {
        memory: gpu.clone(),
        offset: 64,
    };
    vec![
        Operation::Store64(bench.at(base), 0x1122_3344_5566_7788),
        Operation::Fence,
        Operation::Store32(bench.at(base + 8), 7),
        Operation::Wait(bench.at(base + 8), Condition::And, 1),
        Operation::Wait(bench.at(base + 8), Condition::Nor, 0xffff_fff0),
        Operation::Wait(bench.at(base + 8), Condition::GreaterOrEqual, 6),
        Operation::Copy(bench.at(base), in_gpu.clone(), 12),
        Operation::Copy(in_gpu, bench.at(base + 16), 12),
    ]
}

fn verify(bench: &Bench, base: usize) -> Result {
    let mut bytes = [0; 28];
    bench.host.read(base, &mut bytes);
    let wanted = [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 7, 0, 0, 0];
    let right = bytes[..12] == wanted && bytes[16..] == wanted;
    ensure(right, format!("the memory has {bytes:x?}"))
}

fn enqueued(bench: &mut Bench) -> Result {
    let gpu = Memory::Gpu(Arc::new(bench.gpu.alloc(4096)?));
    let operations = operations(bench, 4096, &gpu);
    bench.stream.enqueue(&operations)?;
    bench.stream.finish(LIMIT)?;
    verify(bench, 4096)
}

fn batches(bench: &mut Bench) -> Result {
    let all: Vec<_> = (0..1000)
        .map(|i| Operation::Store32(bench.at(8192 + 4 * i), i as u32))
        .collect();
    bench.stream.enqueue(&all)?;
    bench.stream.finish(LIMIT)?;
    let wrong = (0..1000).find(|i| bench.host.word(8192 + 4 * i) != *i as u32);
    ensure(wrong.is_none(), format!("word {wrong:?} is wrong"))
}

fn listed(bench: &mut Bench) -> Result {
    let gpu = Memory::Gpu(Arc::new(bench.gpu.alloc(4096)?));
    let operations = operations(bench, 12_288, &gpu);
    bench.stream.execute(&operations, LIMIT)?;
    bench.stream.finish(LIMIT)?;
    verify(bench, 12_288)
}

fn waits(bench: &mut Bench) -> Result {
    let (flag, done) = (16_384, 16_388);
    bench.stream.execute(
        &[
            Operation::Wait(bench.at(flag), Condition::GreaterOrEqual, 3),
            Operation::Store32(bench.at(done), 1),
        ],
        LIMIT,
    )?;
    ensure(bench.host.word(done) == 0, "the GPU did not wait")?;
    bench.host.write(flag, &3_u32.to_le_bytes());
    bench.stream.finish(LIMIT)?;
    ensure(bench.host.word(done) == 1, "the GPU did not store")
}

/// Lists of which the first waits for a word that nobody writes.
fn unfulfilled(bench: &mut Bench, base: usize, limit: Duration) -> Result {
    bench.stream.execute(
        &[
            Operation::Store32(bench.at(base + 8), 1),
            Operation::Wait(bench.at(base), Condition::And, 1),
            Operation::Store32(bench.at(base + 4), 1),
        ],
        limit,
    )?;
    bench
        .stream
        .execute(&[Operation::Store32(bench.at(base + 4), 2)], limit)?;
    Ok(())
}

fn check_ended(bench: &mut Bench, base: usize, why: Ended) -> Result {
    let error = bench.stream.finish(LIMIT).err().ok_or("no error")?;
    let right = matches!(error, StreamError::Ended { list: 0, index: 1, why: found } if found == why);
    ensure(right, format!("the error is {error:?}"))?;
    ensure(bench.host.word(base + 4) == 0, "the GPU went on after the wait")?;
    // The stream can be used again.
    bench
        .stream
        .execute(&[Operation::Store32(bench.at(base + 4), 3)], LIMIT)?;
    bench.stream.finish(LIMIT)?;
    ensure(bench.host.word(base + 4) == 3, "the stream cannot be used again")
}

fn late(bench: &mut Bench) -> Result {
    unfulfilled(bench, 20_480, SHORT)?;
    check_ended(bench, 20_480, Ended::Late)
}

fn stopped(bench: &mut Bench) -> Result {
    let base = 24_576;
    unfulfilled(bench, base, Duration::from_secs(3600))?;
    // A list that is stopped before it begins ends at index 0.
    let deadline = Instant::now() + LIMIT;
    while bench.host.word(base + 8) == 0 {
        ensure(Instant::now() < deadline, "the list does not begin")?;
        std::thread::yield_now();
    }
    bench.stream.stop();
    check_ended(bench, base, Ended::Stopped)
}

fn added(bench: &mut Bench) -> Result {
    let base = 28_672;
    for i in 0..1000 {
        bench.host.write(base + 4 * i, &(i as u32).to_le_bytes());
    }
    bench.stream.add(&bench.at(base), 1000, 5)?;
    bench.stream.finish(LIMIT)?;
    let wrong = (0..1000).find(|i| bench.host.word(base + 4 * i) != *i as u32 + 5);
    ensure(wrong.is_none(), format!("word {wrong:?} is wrong"))?;
    ensure(bench.host.word(base + 4000) == 0, "the word after the last is not 0")
}

fn refused(bench: &mut Bench) -> Result {
    let size = bench.host.size();
    for operation in [
        Operation::Store32(bench.at(size - 2), 1),
        Operation::Store64(bench.at(4), 1),
        Operation::Wait(bench.at(usize::MAX), Condition::And, 1),
        Operation::Copy(bench.at(0), bench.at(size - 4), 8),
        Operation::Copy(bench.at(0), bench.at(8), 6),
    ] {
        let list = [Operation::Fence, operation];
        for result in [bench.stream.execute(&list, LIMIT), bench.stream.enqueue(&list)] {
            let right = matches!(result, Err(StreamError::Range { index: 1, .. }));
            ensure(right, format!("a list that is out of range: {result:?}"))?;
        }
    }
    ensure(bench.stream.is_idle()?, "a refused list was enqueued")
}

/// The wait is fulfilled at the end, so that the process can free everything.
fn stuck(bench: &mut Bench) -> Result {
    let base = 32_768;
    bench.stream.enqueue(&[
        Operation::Store32(bench.at(base + 8), 1),
        Operation::Wait(bench.at(base), Condition::And, 1),
        Operation::Store32(bench.at(base + 4), 1),
    ])?;
    let begin = Instant::now();
    let error = bench.stream.finish(SHORT).err().ok_or("no error")?;
    let right = matches!(error, StreamError::Stuck { index: Some(1) }) && begin.elapsed() >= SHORT;
    ensure(right, format!("the error is {error:?}"))?;
    ensure(bench.host.word(base + 4) == 0, "the GPU did not wait")?;
    bench.host.write(base, &1_u32.to_le_bytes());
    bench.stream.finish(LIMIT)?;
    ensure(bench.host.word(base + 4) == 1, "the GPU did not store")
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! Executors of byte code that run programs in order, and compute between them.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use p2pmem_async::bytecode::Program;
use p2pmem_async::gpu::{GpuExecutor, Method};
use p2pmem_async::interpreter::Interpreter;
use p2pmem_async::region::Region;
use p2pmem_cuda_sys::{Gpu, Memory, Place};

use crate::node::Node;

/// Executes programs, and computes, in order.
pub trait Executor {
    /// Submits a program.
    ///
    /// # Errors
    ///
    /// The executor refuses the program.
    fn submit(&mut self, program: &Program) -> Result<()>;

    /// Submits a computation: adds 1 to each 32-bit word of a region.
    ///
    /// # Errors
    ///
    /// The executor refuses the computation.
    fn add(&mut self, region: &Region) -> Result<()>;

    /// Waits until everything that was submitted is executed.
    ///
    /// # Errors
    ///
    /// An operation failed, or did not end within the limit.
    fn finish(&mut self, limit: Duration) -> Result<()>;
}

enum Work {
    Program(Program),
    Add(Region),
    Finish,
}

/// A thread that interprets byte code.
pub struct Cpu {
    work: Option<Sender<Work>>,
    results: Receiver<Result<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Cpu {
    /// Starts the thread for a node.
    pub fn new(node: &Node, limit: Duration) -> Self {
        let interpreter = Interpreter::new(limit).map_all(node.regions());
        let (work, received) = channel();
        let (ended, results) = channel();
        let thread = std::thread::spawn(move || {
            let mut result = Ok(());
            for work in received {
                match work {
                    // After a failure, nothing is executed.
                    Work::Program(program) if result.is_ok() => {
                        result = interpreter.run(&program).map_err(anyhow::Error::from);
                    }
                    Work::Add(region) if result.is_ok() => {
                        for at in (0..region.len()).step_by(4) {
                            region.store_dword(at, region.load_dword(at).wrapping_add(1));
                        }
                    }
                    Work::Program(_) | Work::Add(_) => {}
                    Work::Finish => {
                        if ended.send(std::mem::replace(&mut result, Ok(()))).is_err() {
                            return;
                        }
                    }
                }
            }
        });
        Self {
            work: Some(work),
            results,
            thread: Some(thread),
        }
    }

    fn send(&self, work: Work) -> Result<()> {
        let sender = self.work.as_ref().context("the thread has ended")?;
        sender.send(work).map_err(|_| anyhow!("the thread has ended"))
    }
}

impl Executor for Cpu {
    fn submit(&mut self, program: &Program) -> Result<()> {
        self.send(Work::Program(program.clone()))
    }

    fn add(&mut self, region: &Region) -> Result<()> {
        self.send(Work::Add(region.clone()))
    }

    fn finish(&mut self, limit: Duration) -> Result<()> {
        self.send(Work::Finish)?;
        self.results.recv_timeout(limit).context("the CPU does not finish")?
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        self.work = None;
        // Each poll has a limit, so the thread ends.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A stream of a GPU.
pub struct OnGpu {
    executor: GpuExecutor,
}

impl OnGpu {
    /// Creates a stream for a node, and maps the node's shared memory.
    ///
    /// # Errors
    ///
    /// CUDA refuses the memory or the stream.
    pub fn new(node: &Node, gpu: &Gpu, method: Method, limit: Duration) -> Result<Self> {
        let file = node.ram().0.fd().try_clone_to_owned()?;
        let memory = Memory::Host(gpu.map_host(file)?.into());
        let mut executor = GpuExecutor::new(gpu, method, limit)?;
        for region in node.regions() {
            let place = Place {
                memory: memory.clone(),
                offset: region.start(),
            };
            executor.map(region, place);
        }
        Ok(Self { executor })
    }
}

impl Executor for OnGpu {
    fn submit(&mut self, program: &Program) -> Result<()> {
        Ok(self.executor.submit(program)?)
    }

    fn add(&mut self, region: &Region) -> Result<()> {
        let place = self
            .executor
            .mapped(region)
            .context("the region is not mapped")?
            .clone();
        Ok(self.executor.stream().add(&place, (region.len() / 4) as u32, 1)?)
    }

    fn finish(&mut self, limit: Duration) -> Result<()> {
        Ok(self.executor.finish(limit)?)
    }
}

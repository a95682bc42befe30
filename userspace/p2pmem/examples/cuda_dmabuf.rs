// SPDX-License-Identifier: MIT OR Apache-2.0

//! Allocates memory of an NVIDIA GPU with CUDA, exports the memory as a dma-buf, and registers the dma-buf with an RDMA
//! NIC, so that the NIC reads and writes GPU memory without host memory in between.
//!
//! Usage: cuda_dmabuf [NIC]
//!
//! The default NIC is the first RDMA device. CUDA_VISIBLE_DEVICES selects the GPU. The kernel module p2pmem is not
//! needed.

use std::error::Error;
use std::process::ExitCode;

use p2pmem::{human_size, Access, Client, DmaBuf, Path, PciAddr, Pd};
use p2pmem_cuda_sys::Cuda;

/// Size of the memory: a multiple of the 64 KiB and 2 MiB pages of GPUs, so the range consists of whole pages.
const SIZE: usize = 4 << 20;

fn main() -> ExitCode {
    match run(std::env::args().nth(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cuda_dmabuf: {error}");
            if let Some(remedy) = error.downcast_ref::<p2pmem::Error>().and_then(p2pmem::Error::remedy) {
                eprintln!("{remedy}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run(nic: Option<String>) -> Result<(), Box<dyn Error>> {
    let cuda = Cuda::load()?;
    let gpu = cuda.first_gpu()?;
    let addr: PciAddr = gpu.pci_addr()?.parse()?;
    println!("GPU: {} at {addr}", gpu.name()?);
    if !gpu.supports_dma_bufs()? {
        return Err(
            "the GPU's driver does not export dma-bufs: use NVIDIA's open kernel modules and Linux 5.12 or later"
                .into(),
        );
    }

    // Values are dropped in reverse order: the registration, the dma-buf, the memory, the CUDA context.
    let memory = gpu.alloc(SIZE)?;
    let dmabuf = DmaBuf::from_fd(memory.export()?)?.of_device(addr);
    println!(
        "dma-buf: {}, exporter {}",
        human_size(dmabuf.size()),
        dmabuf.exporter().unwrap_or_else(|| "unknown".into())
    );

    let Some(name) = nic.or_else(first_nic) else {
        println!("registration: none, because /sys/class/infiniband has no RDMA NIC");
        return Ok(());
    };
    let client = Client::resolve(&name)?;
    println!("path to {client}: {}", described(&dmabuf.path_to(&client)?));
    let pd = Pd::open(&name)?;
    let registration = dmabuf.register(&pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ)?;
    println!(
        "registration: {} with {name}, address {:#x}, rkey {:#x}",
        human_size(registration.len() as u64),
        registration.addr(),
        registration.rkey()
    );
    Ok(())
}

/// Returns the name of the first RDMA device that has a PCI function.
fn first_nic() -> Option<String> {
    let devices = std::fs::read_dir("/sys/class/infiniband").ok()?;
    let mut names: Vec<_> = devices
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names.into_iter().find(|name| Client::resolve(name).is_ok())
}

/// Returns the path in words.
fn described(path: &Path) -> String {
    let redirected = if path.acs_redirect { ", redirected by ACS" } else { "" };
    format!("{} ({} links{redirected})", path.class.meaning(), path.hops)
}

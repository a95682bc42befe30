// SPDX-License-Identifier: MIT OR Apache-2.0

//! Decisions over all devices that could lend memory, whether their memory is published or not.
//!
//! Without the module, the decision needs nothing but sysfs.

use std::path::Path as FsPath;

use p2pmem_sys as abi;

use crate::addr::PciAddr;
use crate::backend::Backend;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::explain::{Explanation, Verdict, VerdictCode};
use crate::inventory::{Availability, Inventory, MemoryDevice, Source};
use crate::pci::Client;
use crate::request::{Request, Strategy};
use crate::standalone::decision::{decide, Candidate};
use crate::topology::{no_function, Walk, Walks};
use crate::types::{human_size, Path, Provider};

/// A device that could lend memory, and the verdict on it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct CandidateDevice {
    /// The verdict. Its `provider` is 0 if the device is not a provider.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// The source that a program would use first, and what it needs.
    pub source: Source,
}

/// The answer to the question which memory a request would get if all memory of the machine were published.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct WhatIf {
    /// Whether the module's providers and its verdicts on them are part of the decision. Otherwise, all is computed from
    /// sysfs.
    pub module: bool,
    /// The device that would be chosen.
    pub chosen: Option<PciAddr>,
    /// The errno of an allocation if no device can serve the request, positive.
    pub errno: Option<i32>,
    /// The outcome as a message.
    pub text: String,
    /// The devices with memory, by address.
    pub candidates: Vec<CandidateDevice>,
}

impl WhatIf {
    /// Decides which memory `request` would get if all devices with memory were published. The order is that of
    /// [`Strategy::Nearest`]. `device` is the open module, if it is loaded: its providers keep the verdicts that rules, quotas,
    /// and used memory give them. Rules do not apply to devices that are not providers, and their paths are computed as by
    /// [`path_between`](crate::path_between).
    ///
    /// # Errors
    ///
    /// [`Error::Request`] for an invalid request, another strategy, or a required or preferred provider;
    /// [`Error::Client`] if a client does not exist; [`Error::Admin`] if sysfs has no PCI bus; those of
    /// [`Device::explain`].
    ///
    /// ```no_run
    /// use p2pmem::{Client, Request, WhatIf};
    ///
    /// let request = Request::new(16 << 20).near([Client::resolve("mlx5_0")?]);
    /// let answer = WhatIf::decide(None, &request)?;
    /// for device in &answer.candidates {
    ///     println!("{}: {} ({})", device.verdict.addr, device.verdict.why, device.source.detail);
    /// }
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    pub fn decide(device: Option<&Device>, request: &Request) -> Result<Self> {
        Self::decide_in(FsPath::new("/"), device, request)
    }

    /// As [`WhatIf::decide`], with the machine's file system at `root`.
    ///
    /// # Errors
    ///
    /// Those of [`WhatIf::decide`].
    pub fn decide_in(root: &FsPath, device: Option<&Device>, request: &Request) -> Result<Self> {
        let raw = request.raw()?;
        if request.strategy != Strategy::Nearest || raw.provider != 0 {
            return Err(Error::Request(
                "a decision over unpublished memory has the strategy nearest, and no provider is required or preferred"
                    .into(),
            ));
        }
        let known = match device {
            Some(device) => known_providers(device, request)?,
            None => Vec::new(),
        };
        let addrs: Vec<_> = known.iter().map(|known| known.provider.addr).collect();
        let inventory = Inventory::read_in(root, device.map(|_| addrs.as_slice()))?;
        let mut candidates: Vec<_> = known.into_iter().map(Rated::of_provider).collect();
        let sys = root.join("sys");
        let mut walks = Walks::default();
        let clients = walks_of(&mut walks, &sys, request.clients())?;
        for memory_device in &inventory.memory_devices {
            if addrs.contains(&memory_device.device.addr) {
                continue;
            }
            let Some(walk) = walks.get(&sys, memory_device.device.addr) else {
                // The device was removed during the call.
                continue;
            };
            let paths = clients.iter().map(|client| walk.path_to(&sys, client)).collect();
            candidates.extend(Rated::of_memory_device(memory_device, paths));
        }
        candidates.sort_by_key(|device| device.candidate.addr);
        Ok(outcome(device.is_some(), candidates, &raw, request.clients()))
    }
}

/// A provider of the module, and the module's verdict.
struct KnownProvider {
    provider: Provider,
    verdict: Verdict,
    paths: Vec<Path>,
}

fn known_providers(device: &Device, request: &Request) -> Result<Vec<KnownProvider>> {
    let explanation = device.explain(request)?;
    let paths = match request.clients() {
        [] => Vec::new(),
        clients => device.paths(clients)?,
    };
    let known = device.providers()?.into_iter().filter_map(|provider| {
        // A provider that was added or removed between the calls is omitted.
        let verdict = explanation.verdicts.iter().find(|v| v.provider == provider.id)?.clone();
        let paths: Vec<_> = paths.iter().filter(|p| p.provider == provider.id).cloned().collect();
        (paths.len() == request.clients().len()).then_some(KnownProvider {
            provider,
            verdict,
            paths,
        })
    });
    Ok(known.collect())
}

fn walks_of(walks: &mut Walks, sys: &FsPath, clients: &[Client]) -> Result<Vec<std::sync::Arc<Walk>>> {
    let walk = |client: &Client| {
        walks
            .get(sys, client.addr())
            .ok_or_else(|| no_function(client.addr(), client.name()))
    };
    clients.iter().map(walk).collect()
}

/// A device with memory before the decision.
struct Rated {
    candidate: Candidate,
    /// The id of the provider, 0 if the device is not a provider.
    provider: u32,
    source: Source,
    /// The verdict, if the device cannot serve the request whatever the other devices are.
    verdict: Option<Verdict>,
}

impl Rated {
    fn of_provider(known: KnownProvider) -> Self {
        let KnownProvider {
            provider,
            verdict,
            paths,
        } = known;
        // These providers could serve the request; the decision among them and the other devices is made again.
        let can_serve = matches!(
            verdict.code,
            VerdictCode::Chosen
                | VerdictCode::Class
                | VerdictCode::Hops
                | VerdictCode::Bandwidth
                | VerdictCode::Numa
                | VerdictCode::Load
                | VerdictCode::Space
                | VerdictCode::Order
        );
        Self {
            candidate: Candidate {
                id: 0,
                addr: provider.addr,
                size: verdict.size,
                free: verdict.free,
                largest: verdict.largest,
                paths,
            },
            provider: provider.id,
            source: Source {
                backend: Backend::Module,
                availability: Availability::Ready,
                missing: Backend::Module.missing().collect(),
                detail: "it is a provider".into(),
            },
            verdict: (!can_serve).then_some(verdict),
        }
    }

    /// Returns the device, or none if it has no source.
    fn of_memory_device(memory_device: &MemoryDevice, paths: Vec<Path>) -> Option<Self> {
        let source = memory_device.best()?.clone();
        let size = memory_device.size().unwrap_or(0);
        let free = memory_device.pool.map_or(size, |pool| pool.available);
        Some(Self {
            candidate: Candidate {
                id: 0,
                addr: memory_device.device.addr,
                size,
                free,
                largest: free,
                paths,
            },
            provider: 0,
            source,
            verdict: None,
        })
    }

    fn is_usable(&self) -> bool {
        self.source.availability != Availability::Unavailable
    }
}

/// Decides among devices that are ordered by address.
fn outcome(module: bool, mut candidates: Vec<Rated>, request: &abi::p2pmem_request, clients: &[Client]) -> WhatIf {
    for (id, device) in (1..).zip(&mut candidates) {
        device.candidate.id = id;
    }
    let compete = |device: &&Rated| device.verdict.is_none() && device.is_usable();
    let competing: Vec<_> = candidates
        .iter()
        .filter(compete)
        .map(|device| device.candidate.clone())
        .collect();
    let explained = |candidates: &[Candidate]| {
        let decision = decide(candidates, request);
        let raw = abi::p2pmem_explain {
            req: *request,
            error: decision.error.unsigned_abs(),
            chosen: decision.chosen,
            ..Default::default()
        };
        Explanation::new(&raw, &decision.verdicts, decision.text, clients)
    };
    let decision = explained(&competing);
    let candidates = candidates.into_iter().filter_map(|device| {
        let made = || {
            let made = decision.verdicts.iter().find(|v| v.provider == device.candidate.id);
            made.cloned()
        };
        // No other device competes with a device whose memory cannot be used. Its path is shown nevertheless.
        let unusable = || {
            let mut verdict = explained(std::slice::from_ref(&device.candidate)).verdicts.pop()?;
            verdict.code = VerdictCode::NoSource;
            verdict.why = format!("no source: {}", device.source.detail);
            Some(verdict)
        };
        let verdict = device.verdict.clone().or_else(made).or_else(unusable)?;
        Some(CandidateDevice {
            verdict: Verdict {
                provider: device.provider,
                ..verdict
            },
            source: device.source,
        })
    });
    let candidates: Vec<_> = candidates.collect();
    let has = |codes: &[VerdictCode]| candidates.iter().find(|device| codes.contains(&device.verdict.code));
    let chosen = has(&[VerdictCode::Chosen]).map(|device| device.verdict.addr);
    let size = human_size(request.size);
    let (errno, text) = match chosen {
        Some(addr) => (None, format!("{addr} would be chosen")),
        None if has(&[VerdictCode::Full, VerdictCode::Fragmented]).is_some() => {
            (Some(libc::ENOSPC), format!("no device with memory has {size} free"))
        }
        None => (Some(libc::ENODEV), format!("no device with memory could serve {size}")),
    };
    WhatIf {
        module,
        chosen,
        errno,
        text,
        candidates,
    }
}

#[cfg(test)]
mod tests;

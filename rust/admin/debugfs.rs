// SPDX-License-Identifier: GPL-2.0

//! debugfs: `/sys/kernel/debug/p2pmem/{providers,buffers,dmabufs,registrations,peer_memory,stats}`, for people who look for what is going on.

use crate::{
    alloc::orchestrator::Orchestrator,
    ext::abi,
    mem::buffer::State,
    share::{
        dmabuf,
        peer_client, //
    }, //
};
use kernel::{
    debugfs::{Dir, File},
    fmt,
    prelude::*,
    sync::Arc,
};

/// The files; they go with this.
#[pin_data]
pub(crate) struct Files {
    #[pin]
    providers: File<Arc<Orchestrator>>,
    #[pin]
    buffers: File<Arc<Orchestrator>>,
    #[pin]
    dmabufs: File<Arc<Orchestrator>>,
    #[pin]
    registrations: File<Arc<Orchestrator>>,
    #[pin]
    peer_memory: File<Arc<Orchestrator>>,
    #[pin]
    stats: File<Arc<Orchestrator>>,
    dir: Dir,
}

/// Makes the folder and its files.
pub(crate) fn files(orchestrator: Arc<Orchestrator>) -> impl PinInit<Files, Error> {
    let dir = Dir::new(c"p2pmem");
    let (a, b, c, d, e, g) = (
        orchestrator.clone(),
        orchestrator.clone(),
        orchestrator.clone(),
        orchestrator.clone(),
        orchestrator.clone(),
        orchestrator,
    );
    let keep = dir.clone();
    pin_init::pin_init_scope(move || {
        Ok(try_pin_init!(Files {
            providers <- dir.clone().read_callback_file(c"providers", Ok::<_, Error>(a), &providers),
            buffers <- dir.clone().read_callback_file(c"buffers", Ok::<_, Error>(b), &buffers),
            dmabufs <- dir.clone().read_callback_file(c"dmabufs", Ok::<_, Error>(c), &dmabuf::describe_all),
            registrations <- dir.clone().read_callback_file(c"registrations", Ok::<_, Error>(e), &registrations),
            peer_memory <- dir.clone().read_callback_file(c"peer_memory", Ok::<_, Error>(g), &peer_memory),
            stats <- dir.clone().read_callback_file(c"stats", Ok::<_, Error>(d), &stats),
            dir: keep,
        }? Error))
    })
}

/// One line a provider.
fn providers(orchestrator: &Arc<Orchestrator>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str("id function size free largest buffers exports parked scrubbing kernel_reserve\n")?;
    for provider in &orchestrator.providers().map_err(|_| fmt::Error)? {
        let row = provider.describe();
        f.write_fmt(fmt!(
            "{} {} {} {} {} {} {} {} {} {}\n",
            row.id,
            provider.addr,
            row.size,
            row.free,
            row.largest,
            row.buffers,
            row.exports,
            row.parked,
            row.scrubbing,
            row.kernel_reserve
        ))?;
    }
    Ok(())
}

/// One line a buffer: who holds what.
fn buffers(orchestrator: &Arc<Orchestrator>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut result = f.write_str("id function size bar_offset mappings exports state owner\n");
    for provider in &orchestrator.providers().map_err(|_| fmt::Error)? {
        provider.for_each_buffer(|buffer| {
            let (state, mappings) = buffer.status();
            let (exports, _) = buffer.exports();
            let state = match state {
                State::Live => "live",
                State::Revoking => "revoking",
                State::Gone => "gone",
            };
            let line = f.write_fmt(fmt!(
                "{} {} {} {:#x} {} {} {} {}\n",
                buffer.id,
                provider.addr,
                buffer.size,
                buffer.bar_offset.unwrap_or(u64::MAX),
                mappings,
                exports,
                state,
                buffer.owner
            ));
            result = result.and(line);
        });
    }
    result
}

/// What RDMA adapters have registered by way of mappings.
fn registrations(_: &Arc<Orchestrator>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    peer_client::list(f)
}

/// Where the peer-memory interface was found, how the client is registered, and what was called.
fn peer_memory(_: &Arc<Orchestrator>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    peer_client::describe(f)
}

/// The counters of all providers there ever were.
fn stats(orchestrator: &Arc<Orchestrator>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut sum = abi::Stats::default();
    // Asked for all, it cannot be refused.
    let _ = orchestrator.stats(0, &mut sum);
    f.write_fmt(fmt!(
        "allocs {}\nfrees {}\nfailed {}\nalloc_bytes {}\nfree_bytes {}\nmaps {}\nscrubbed_bytes {}\nparked {}\nrevoked {}\n\
         exports {}\nattaches {}\nattach_failed {}\n",
        sum.allocs,
        sum.frees,
        sum.failed,
        sum.alloc_bytes,
        sum.free_bytes,
        sum.maps,
        sum.scrubbed_bytes,
        sum.parked,
        sum.revoked,
        sum.exports,
        sum.attaches,
        sum.attach_failed
    ))
}

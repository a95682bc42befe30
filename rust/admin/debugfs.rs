// SPDX-License-Identifier: GPL-2.0

//! debugfs: `/sys/kernel/debug/p2pmem/{providers,buffers,dmabufs,attachments,registrations,peer_memory,stats}`.
//!
//! The files are for debugging, have one line for each object, and are no ABI. Documentation/design/observation.md
//! describes them.
//!
//! C header: [`include/linux/debugfs.h`](srctree/include/linux/debugfs.h)
//!
//! Context: process context, may sleep. debugfs holds no lock that other files need. The walks take the module's locks for
//! one object at a time.

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

/// The directory and its files. Dropping it removes them, and waits for readers.
#[pin_data]
pub(crate) struct Files {
    #[pin]
    providers: File<Arc<Orchestrator>>,
    #[pin]
    buffers: File<Arc<Orchestrator>>,
    #[pin]
    dmabufs: File<Arc<Orchestrator>>,
    #[pin]
    attachments: File<Arc<Orchestrator>>,
    #[pin]
    registrations: File<Arc<Orchestrator>>,
    #[pin]
    peer_memory: File<Arc<Orchestrator>>,
    #[pin]
    stats: File<Arc<Orchestrator>>,
    dir: Dir,
}

/// Creates the directory and its files.
pub(crate) fn files(orchestrator: Arc<Orchestrator>) -> impl PinInit<Files, Error> {
    let dir = Dir::new(c"p2pmem");
    let (a, b, c, d, e, g, h) = (
        orchestrator.clone(),
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
            attachments <- dir.clone().read_callback_file(c"attachments", Ok::<_, Error>(h), &attachments),
            registrations <- dir.clone().read_callback_file(c"registrations", Ok::<_, Error>(e), &registrations),
            peer_memory <- dir.clone().read_callback_file(c"peer_memory", Ok::<_, Error>(g), &peer_memory),
            stats <- dir.clone().read_callback_file(c"stats", Ok::<_, Error>(d), &stats),
            dir: keep,
        }? Error))
    })
}

/// `providers`: one line for each provider.
fn providers(orchestrator: &Arc<Orchestrator>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str("id function size free largest buffers exports pinned scrubbing kernel_reserve\n")?;
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
            row.pinned,
            row.scrubbing,
            row.kernel_reserve
        ))?;
    }
    Ok(())
}

/// `buffers`: one line for each buffer, with its owner.
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
                buffer.bar_offset,
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

/// `attachments`: each attachment of a function to a dma-buf, with its ranges.
fn attachments(orchestrator: &Arc<Orchestrator>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut result = Ok(());
    for provider in &orchestrator.providers().map_err(|_| fmt::Error)? {
        provider.for_each_attachment(|attachment| {
            result = result.and_then(|()| attachment.describe(f));
        });
    }
    result
}

/// `registrations`: one line for each registration through the peer-memory interface.
fn registrations(_: &Arc<Orchestrator>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    peer_client::list(f)
}

/// `peer_memory`: the interface, the form of the client, and the counters of calls.
fn peer_memory(_: &Arc<Orchestrator>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    peer_client::describe(f)
}

/// `stats`: the sums of all providers since the module was loaded.
fn stats(orchestrator: &Arc<Orchestrator>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut sum = abi::Stats::default();
    // Cannot fail: only an unknown provider is refused.
    let _ = orchestrator.stats(0, &mut sum);
    f.write_fmt(fmt!(
        "allocs {}\nfrees {}\nfailed {}\nalloc_bytes {}\nfree_bytes {}\nmaps {}\nscrubbed_bytes {}\npinned {}\nrevoked {}\n\
         exports {}\nattaches {}\nattach_failed {}\n",
        sum.allocs,
        sum.frees,
        sum.failed,
        sum.alloc_bytes,
        sum.free_bytes,
        sum.maps,
        sum.scrubbed_bytes,
        sum.pinned,
        sum.revoked,
        sum.exports,
        sum.attaches,
        sum.attach_failed
    ))
}

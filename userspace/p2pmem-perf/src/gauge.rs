// SPDX-License-Identifier: MIT OR Apache-2.0

//! `gauge`: a page in the browser that shows rates while they are measured, and starts and stops measurements.
//!
//! [`serve`] serves the page with the server of [`p2pmem_web`]. One measurement runs at a time, on a thread of its own, which
//! needs no viewer: a viewer that opens the page in the middle of a measurement gets the whole state first. [`Measurements`]
//! is what measures, so that tests need no NICs.

mod api;
mod args;
mod export;
mod job;
mod measurements;
mod state;

use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;

use anyhow::{ensure, Context, Result};
use p2pmem_web::{token, Access, Asset, Server, Service, Site, SCRIPT, STYLE};
use rustix::rand::{getrandom, GetRandomFlags};

pub use args::{GaugeArgs, ServerAddress};
pub use measurements::{Measurements, Nodes};
pub use state::Gauge;

const SITE: Site = Site {
    name: "p2pmem-perf",
    title: "p2pmem gauge",
    token_hint: "The token that the gauge was started with, or printed when it started.",
    guide: "Documentation/userspace.md",
    index: include_str!("../web/index.html"),
    assets: &[
        Asset {
            path: "/assets/gauge.js",
            kind: SCRIPT,
            content: include_str!("../web/gauge.js"),
        },
        Asset {
            path: "/assets/gauge.css",
            kind: STYLE,
            content: include_str!("../web/gauge.css"),
        },
    ],
};

/// Serves the page until the program ends.
///
/// # Errors
///
/// The token cannot be used, no NIC exists, or the address is not available. The message says what to do.
pub fn run(args: &GaugeArgs, out: &mut dyn Write) -> Result<()> {
    let (token, is_new) = match &args.token_file {
        Some(path) => (token::read(path)?, false),
        None => (random_token()?, true),
    };
    let nodes = Nodes::new(args);
    let gauge = Gauge::new(Box::new(nodes), args.server.clone())?;
    let listener = TcpListener::bind(args.listen).with_context(|| {
        format!(
            "listening on {}: is another gauge running? --listen sets the address",
            args.listen
        )
    })?;
    let server = serve(gauge, listener, &Access::new(token.as_str()))?;
    writeln!(out, "gauge at http://{}/", server.address())?;
    if is_new {
        writeln!(out, "token: {token}")?;
    }
    out.flush()?;
    loop {
        std::thread::park();
    }
}

/// Serves the page of a gauge on a thread of its own.
///
/// # Errors
///
/// The token is too short, or no thread can be created.
pub fn serve(gauge: Arc<Gauge>, listener: TcpListener, access: &Access) -> std::io::Result<Server> {
    let service = Service {
        site: &SITE,
        changed: gauge.changed(),
        api: api::routes(Arc::clone(&gauge)),
        state: gauge,
    };
    p2pmem_web::serve(service, listener, access)
}

/// Returns a token for one run of the program.
fn random_token() -> Result<String> {
    let mut bytes = [0; 16];
    let count = getrandom(&mut bytes, GetRandomFlags::empty()).context("the kernel gave no random number")?;
    ensure!(
        count == bytes.len(),
        "the kernel gave too few random bytes: specify --token-file"
    );
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

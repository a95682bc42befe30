// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the gauge: its interface for programs, and its page in headless Chromium. Each test has its own gauge, whose
//! measurements need no NICs.

#[path = "../../../p2pmem-web/tests/harness/browser.rs"]
mod browser;
#[path = "../../../p2pmem-web/tests/harness/http.rs"]
mod client;
mod command;
mod fake;
mod http;
mod page;

use std::net::TcpListener;
use std::ops::Deref;
use std::sync::Arc;

use client::HttpClient;
use fake::{Fake, Script};
use p2pmem_perf::gauge::{serve, Gauge};
use p2pmem_web::{Access, Server};

const TOKEN: &str = "a token of the tests";

/// A gauge with its server.
struct Bed {
    script: Arc<Script>,
    server: Server,
    client: HttpClient,
}

impl Bed {
    fn new() -> Self {
        let script = Arc::new(Script::default());
        let gauge = Gauge::new(Box::new(Fake(Arc::clone(&script))), "node-b".parse().unwrap()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = serve(gauge, listener, &Access::new(TOKEN)).unwrap();
        let client = HttpClient {
            address: server.address(),
            token: TOKEN,
        };
        Self { script, server, client }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.server.address())
    }
}

impl Deref for Bed {
    type Target = HttpClient;

    fn deref(&self) -> &HttpClient {
        &self.client
    }
}

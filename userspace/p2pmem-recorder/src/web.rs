// SPDX-License-Identifier: MIT OR Apache-2.0

//! The management of a storage node in the browser, and its interface for programs.
//!
//! [`serve`] answers HTTP requests on a thread of its own, with the server of [`p2pmem_web`]. Pages and programs use the same interface, which
//! `Documentation/recorder.md` describes. A person logs in with a token and gets a cookie; a program sends the token with
//! each request. The connection is not encrypted: a reverse proxy adds TLS.

mod api;
mod app;
mod error;
mod service;
mod state;
mod topology;

#[cfg(test)]
mod tests;

pub use app::WebOptions;
pub use p2pmem_web::token::MIN_TOKEN;
pub use p2pmem_web::Server;
pub use service::serve;
pub use topology::Machine;

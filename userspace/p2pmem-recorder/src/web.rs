// SPDX-License-Identifier: MIT OR Apache-2.0

//! The management of a storage node in the browser, and its interface for programs.
//!
//! [`serve`] answers HTTP requests on a thread of its own. Pages and programs use the same interface, which
//! `Documentation/recorder.md` describes. A person logs in with a token and gets a cookie; a program sends the token with
//! each request. The connection is not encrypted: a reverse proxy adds TLS.

mod api;
mod app;
mod auth;
mod error;
mod events;
mod guard;
mod pages;
mod server;
mod topology;

#[cfg(test)]
mod tests;

pub use app::{WebOptions, MIN_TOKEN};
pub use server::{serve, Server};
pub use topology::Machine;

// SPDX-License-Identifier: MIT OR Apache-2.0

//! Pages in the browser for programs, and the same for other programs as JSON.
//!
//! A program gives its page, its state, and its paths below `/api` to [`serve`], which answers HTTP requests on a thread of
//! its own. A person logs in with a token and gets a cookie; a program sends the token with each request. `/api/status` has
//! the state as JSON, `/api/events` sends it each second and after each change. The connection is not encrypted: a reverse
//! proxy adds TLS.
//!
//! Without the feature `server`, only [`token`] exists.

#[cfg(feature = "server")]
mod auth;
#[cfg(feature = "server")]
mod changes;
#[cfg(feature = "server")]
mod error;
#[cfg(feature = "server")]
mod events;
#[cfg(feature = "server")]
mod extract;
#[cfg(feature = "server")]
mod guard;
#[cfg(feature = "server")]
mod pages;
#[cfg(feature = "server")]
mod server;
#[cfg(feature = "server")]
mod site;
pub mod token;

#[cfg(feature = "server")]
pub use changes::{Changes, MAX_CHANGES};
#[cfg(feature = "server")]
pub use error::ApiError;
#[cfg(feature = "server")]
pub use extract::{Json, PathParts};
#[cfg(feature = "server")]
pub use guard::Peer;
#[cfg(feature = "server")]
pub use server::{serve, Server, Service};
#[cfg(feature = "server")]
pub use site::{Access, Asset, Changed, Site, State, MAX_BODY, MAX_STREAMS, SCRIPT, STYLE};

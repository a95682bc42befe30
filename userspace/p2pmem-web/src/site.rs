// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a program serves, who has access, and what all requests share.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{watch, Notify, Semaphore};

use crate::auth::Auth;

/// The latest state as JSON.
pub(crate) type Snapshots = watch::Receiver<Arc<str>>;

/// Bytes of the body of a request.
pub const MAX_BODY: usize = 16 << 10;
/// Event streams at the same time.
pub const MAX_STREAMS: usize = 32;

/// The type of scripts.
pub const SCRIPT: &str = "text/javascript; charset=utf-8";
/// The type of styles.
pub const STYLE: &str = "text/css; charset=utf-8";

/// The page of a program.
#[derive(Debug)]
pub struct Site {
    /// The name of the program, such as `p2pmem-recorder`: for the cookie, and for password managers. Programs on one machine
    /// have different names, because browsers send cookies to all ports.
    pub name: &'static str,
    /// The title of the login.
    pub title: &'static str,
    /// Which token the login asks for.
    pub token_hint: &'static str,
    /// The document with the table of the paths below `/api`.
    pub guide: &'static str,
    /// The page, as HTML.
    pub index: &'static str,
    /// The files that the page loads, in addition to those of all programs.
    pub assets: &'static [Asset],
}

/// A file that the page loads. Everyone may read it.
#[derive(Debug, Clone, Copy)]
pub struct Asset {
    /// Its path, such as `/assets/app.js`.
    pub path: &'static str,
    /// Its type, such as [`SCRIPT`].
    pub kind: &'static str,
    /// Its content.
    pub content: &'static str,
}

/// The state that the page shows.
pub trait State: Send + Sync + 'static {
    /// Returns the state as a JSON object. May block.
    ///
    /// # Errors
    ///
    /// The state has no JSON.
    fn json(&self) -> serde_json::Result<String>;
}

/// Says that the state has changed. Clones say it to the same server.
#[derive(Debug, Clone, Default)]
pub struct Changed(Arc<Notify>);

impl Changed {
    /// Lets the server publish the state soon.
    pub fn notify(&self) {
        self.0.notify_one();
    }

    pub(crate) async fn wait(&self) {
        self.0.notified().await;
    }
}

/// Who has access, and for how long.
#[derive(Clone)]
pub struct Access {
    pub(crate) token: String,
    pub(crate) login: Duration,
    pub(crate) interval: Duration,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access")
            .field("login", &self.login)
            .finish_non_exhaustive()
    }
}

impl Access {
    /// Returns the access with a token of at least [`MIN_TOKEN`](crate::token::MIN_TOKEN) bytes. A login lasts 12 hours.
    pub fn new(token: impl Into<String>) -> Self {
        Self {
            token: token.into(),
            login: Duration::from_secs(12 * 60 * 60),
            interval: Duration::from_secs(6),
        }
    }

    /// Sets how long a login in the browser lasts.
    #[must_use]
    pub fn login_lasts(mut self, time: Duration) -> Self {
        self.login = time;
        self
    }

    /// Sets after which time an address may fail to log in once more. The default is 6 s.
    #[must_use]
    pub fn attempts_every(mut self, time: Duration) -> Self {
        self.interval = time;
        self
    }
}

/// What all requests share.
pub(crate) struct App {
    pub(crate) site: &'static Site,
    pub(crate) state: Arc<dyn State>,
    pub(crate) auth: Auth,
    /// The name of the login's cookie.
    pub(crate) cookie: Arc<str>,
    pub(crate) snapshots: Snapshots,
    pub(crate) streams: Arc<Semaphore>,
}

impl App {
    pub(crate) fn new(site: &'static Site, state: Arc<dyn State>, access: &Access, snapshots: Snapshots) -> Arc<Self> {
        Arc::new(Self {
            site,
            state,
            auth: Auth::new(&access.token, access.login, access.interval),
            cookie: format!("{}-login", site.name).into(),
            snapshots,
            streams: Arc::new(Semaphore::new(MAX_STREAMS)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_is_not_printed() {
        let text = format!("{:?}", Access::new("a token of the tests"));
        assert!(!text.contains("tests"), "{text}");
    }
}

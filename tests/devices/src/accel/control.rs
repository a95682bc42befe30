// SPDX-License-Identifier: MIT OR Apache-2.0

//! The control socket: what the accelerator knows about itself, for those outside of the guest.
//!
//! One JSON object per line in, one out. Requests: `{"get":"counters"}`, `{"get":"state"}`, `{"reset":"counters"}`.
//! Answers hold `"ok":true` and what was asked for under its name, or `"ok":false` and `"error"`.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use p2pmem_accel_regs::Counter;
use p2pmem_vfio_user::Listener;
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::warn;

use super::Shared;

/// Longest request.
const MAX_LINE: u64 = 64 << 10;
/// How long a peer may be silent before its connection is closed.
const IDLE: Duration = Duration::from_secs(60);

#[derive(Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Request {
    Get(Subject),
    Reset(Resettable),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Subject {
    Counters,
    State,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Resettable {
    Counters,
}

/// Answers requests about one accelerator.
#[derive(Clone, Debug)]
pub struct Control {
    shared: Arc<Shared>,
}

impl Control {
    /// Answers for the accelerator that shares this.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Listens at `path` and answers everyone, each on a thread of its own, as long as the process lives.
    ///
    /// # Errors
    ///
    /// If the socket cannot be made.
    pub fn listen(self, path: &Path) -> io::Result<()> {
        let listener = Listener::bind(path)?;
        std::thread::Builder::new().name("control".into()).spawn(move || {
            loop {
                let answer = listener.accept().and_then(|stream| {
                    let control = self.clone();
                    std::thread::Builder::new().name("control".into()).spawn(move || {
                        if let Err(error) = control.answer_all(&stream) {
                            warn!(%error, "control connection");
                        }
                    })
                });
                if let Err(error) = answer {
                    warn!(%error, "control socket");
                    return;
                }
            }
        })?;
        Ok(())
    }

    fn answer_all(&self, stream: &UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(IDLE))?;
        stream.set_write_timeout(Some(IDLE))?;
        let mut reader = BufReader::new(stream);
        let mut writer = stream;
        loop {
            let mut line = Vec::new();
            let n = match reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            if n == 0 {
                return Ok(());
            }
            let complete = line.ends_with(b"\n") || n as u64 != MAX_LINE;
            let mut answer = if complete {
                self.answer(&line).to_string()
            } else {
                json!({"ok": false, "error": "the request is too long"}).to_string()
            };
            answer.push('\n');
            writer.write_all(answer.as_bytes())?;
            if !complete {
                return Ok(());
            }
        }
    }

    /// Answers one request.
    pub fn answer(&self, request: &[u8]) -> Value {
        match serde_json::from_slice(request) {
            Ok(Request::Get(Subject::Counters)) => json!({"ok": true, "counters": self.counters()}),
            Ok(Request::Get(Subject::State)) => json!({"ok": true, "state": self.state()}),
            Ok(Request::Reset(Resettable::Counters)) => {
                self.shared.reset_counters();
                json!({"ok": true})
            }
            Err(error) => json!({"ok": false, "error": error.to_string()}),
        }
    }

    /// The counters by name.
    pub fn counters(&self) -> Value {
        let values = self.shared.counters();
        Counter::ALL
            .iter()
            .map(|(counter, name)| ((*name).to_owned(), json!(values[*counter as usize])))
            .collect()
    }

    fn state(&self) -> Value {
        let (submitted, completed) = self.shared.queue.sequence();
        let bar2 = self.shared.bar2.load(Ordering::Relaxed);
        json!({
            "connected": self.shared.connected.load(Ordering::Relaxed),
            "memory": self.shared.memory.len(),
            "bar2_address": (bar2 != 0).then_some(bar2),
            "submitted": submitted,
            "completed": completed,
            "pending": self.shared.queue.pending(),
            "interrupts_enabled": self.shared.queue.control() != 0,
        })
    }
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! The control socket: state and counters of a device, for programs outside of the guest.
//!
//! Requests and answers are JSON objects, one per line. Requests: `{"get":"counters"}`, `{"get":"state"}`,
//! `{"reset":"counters"}`; for devices with a link also `{"link":"up"}`, `{"link":"down"}` and
//! `{"link":{"delay_us":100,"loss":0.01}}` (see [`LinkFaults`]), and `{"fail":1}` if the device can simulate a failure; for
//! devices whose transfers can be held in flight `{"hold":{"qpn":64,"write":true,"min_bytes":4096}}` (see
//! [`HeldTransfer`]), `{"hold":"release"}`, `{"get":"hold"}`, and `{"drain":false}`, after which changes of memory keys do
//! not wait for transfers. Answers have `"ok":true` and the result under the request's name, or `"ok":false` and `"error"`.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use p2pmem_vfio_user::Listener;
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::warn;

/// Longest request.
const MAX_LINE: u64 = 64 << 10;
/// How long a peer may be silent before its connection is closed.
const IDLE: Duration = Duration::from_secs(60);

/// The interface of a device to the control socket. Errors are messages for the client.
pub trait Controlled: Send + Sync {
    /// The counters by name.
    ///
    /// # Errors
    ///
    /// The device does not answer.
    fn counters(&self) -> Result<Value, String>;

    /// Sets the counters to 0.
    ///
    /// # Errors
    ///
    /// The device does not answer.
    fn reset_counters(&self) -> Result<(), String>;

    /// What else there is to know, as a JSON object.
    ///
    /// # Errors
    ///
    /// The device does not answer.
    fn state(&self) -> Result<Value, String>;

    /// Takes the link up or down.
    ///
    /// # Errors
    ///
    /// There is none, or the device does not answer.
    fn set_link(&self, up: bool) -> Result<(), String> {
        let _ = up;
        Err("this device has no link".into())
    }

    /// Says what goes wrong on the link from now on.
    ///
    /// # Errors
    ///
    /// There is none, or the device does not answer.
    fn set_faults(&self, faults: LinkFaults) -> Result<(), String> {
        let _ = faults;
        Err("this device has no link".into())
    }

    /// Holds the next matching transfer in flight, or with `None` releases the transfer that is held.
    ///
    /// # Errors
    ///
    /// The device cannot hold transfers.
    fn hold(&self, transfer: Option<HeldTransfer>) -> Result<(), String> {
        let _ = transfer;
        Err("this device holds no transfer".into())
    }

    /// Returns the transfer that is held, as a JSON object.
    ///
    /// # Errors
    ///
    /// The device cannot hold transfers.
    fn held(&self) -> Result<Value, String> {
        Err("this device holds no transfer".into())
    }

    /// Says whether changes of memory keys wait for transfers by the key.
    ///
    /// # Errors
    ///
    /// There are no keys.
    fn set_drain(&self, on: bool) -> Result<(), String> {
        let _ = on;
        Err("this device has no memory keys".into())
    }

    /// Simulates a failure of the device for its driver.
    ///
    /// # Errors
    ///
    /// The device cannot simulate a failure.
    fn fail(&self, syndrome: u8) -> Result<(), String> {
        let _ = syndrome;
        Err("this device cannot look broken".into())
    }
}

/// A transfer that is to be held; what is not named may be anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HeldTransfer {
    /// Its queue pair.
    pub qpn: Option<u32>,
    /// Whether it writes to memory.
    pub write: Option<bool>,
    /// Its length in bytes, at least.
    pub min_bytes: u64,
}

/// What goes wrong on a link; what is not named is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LinkFaults {
    /// How long a packet takes, in microseconds.
    pub delay_us: u32,
    /// Part of the packets that are lost, 0 to 1.
    pub loss: f64,
    /// The n-th packet from now on is lost; 0 for none.
    pub lose_nth: u64,
    /// Part of the packets that arrive twice, 0 to 1.
    pub duplicate: f64,
    /// Part of the packets that change places with the next, 0 to 1.
    pub reorder: f64,
}

impl LinkFaults {
    fn check(self) -> Result<Self, String> {
        for (name, part) in [
            ("loss", self.loss),
            ("duplicate", self.duplicate),
            ("reorder", self.reorder),
        ] {
            if !(0.0..=1.0).contains(&part) {
                return Err(format!("{name} is {part}: it must be from 0 to 1"));
            }
        }
        Ok(self)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Request {
    Get(Subject),
    Reset(Resettable),
    Link(Value),
    Hold(Value),
    Drain(bool),
    Fail(u8),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Subject {
    Counters,
    State,
    Hold,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Resettable {
    Counters,
}

/// Whether there is somebody at the other end, and still something at this one.
#[derive(Debug, Default)]
struct Presence {
    connected: AtomicBool,
    dead: AtomicBool,
}

/// Answers requests about one device; clones answer about the same.
#[derive(Clone)]
pub struct Control {
    device: Arc<dyn Controlled>,
    presence: Arc<Presence>,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("presence", &self.presence).finish()
    }
}

impl Control {
    /// Answers for this device.
    pub fn new(device: Arc<dyn Controlled>) -> Self {
        Self {
            device,
            presence: Arc::default(),
        }
    }

    /// Says whether an emulator is connected, for the answers.
    pub fn set_connected(&self, connected: bool) {
        self.presence.connected.store(connected, Ordering::Relaxed);
    }

    /// Says that the device has broken down and will be served no more, for the answers.
    pub fn set_dead(&self) {
        self.presence.dead.store(true, Ordering::Relaxed);
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
        let answer = serde_json::from_slice(request)
            .map_err(|error| error.to_string())
            .and_then(|request| self.carry_out(request));
        match answer {
            Ok(None) => json!({"ok": true}),
            Ok(Some((name, value))) => json!({"ok": true, name: value}),
            Err(error) => json!({"ok": false, "error": error}),
        }
    }

    fn carry_out(&self, request: Request) -> Result<Option<(&'static str, Value)>, String> {
        match request {
            Request::Get(Subject::Counters) => Ok(Some(("counters", self.counters()?))),
            Request::Get(Subject::State) => Ok(Some(("state", self.state()?))),
            Request::Get(Subject::Hold) => Ok(Some(("hold", self.device.held()?))),
            Request::Hold(Value::String(word)) if word == "release" => self.device.hold(None).map(|()| None),
            Request::Hold(transfer @ Value::Object(_)) => {
                let transfer = serde_json::from_value(transfer).map_err(|error| format!("hold: {error}"))?;
                self.device.hold(Some(transfer)).map(|()| None)
            }
            Request::Hold(other) => Err(format!(
                "hold is {other}: it must be \"release\" or which transfer is to be held"
            )),
            Request::Drain(on) => self.device.set_drain(on).map(|()| None),
            Request::Reset(Resettable::Counters) => self.device.reset_counters().map(|()| None),
            Request::Link(Value::String(word)) if word == "up" => self.device.set_link(true).map(|()| None),
            Request::Link(Value::String(word)) if word == "down" => self.device.set_link(false).map(|()| None),
            Request::Link(faults @ Value::Object(_)) => {
                let faults: LinkFaults = serde_json::from_value(faults).map_err(|error| format!("link: {error}"))?;
                self.device.set_faults(faults.check()?).map(|()| None)
            }
            Request::Link(other) => Err(format!(
                "link is {other}: it must be \"up\", \"down\" or what goes wrong on it"
            )),
            Request::Fail(syndrome) => self.device.fail(syndrome).map(|()| None),
        }
    }

    /// The counters by name.
    ///
    /// # Errors
    ///
    /// The device does not answer.
    pub fn counters(&self) -> Result<Value, String> {
        self.device.counters()
    }

    fn state(&self) -> Result<Value, String> {
        let mut state = self.device.state()?;
        state["connected"] = json!(self.presence.connected.load(Ordering::Relaxed));
        state["dead"] = json!(self.presence.dead.load(Ordering::Relaxed));
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// A device that remembers what was done with its link.
    #[derive(Default)]
    struct Linked(Mutex<Vec<String>>);

    impl Controlled for Linked {
        fn counters(&self) -> Result<Value, String> {
            Err("no answer".into())
        }
        fn reset_counters(&self) -> Result<(), String> {
            Ok(())
        }
        fn state(&self) -> Result<Value, String> {
            Ok(json!({"link": true}))
        }
        fn set_link(&self, up: bool) -> Result<(), String> {
            self.0.lock().unwrap().push(format!("{up}"));
            Ok(())
        }
        fn set_faults(&self, faults: LinkFaults) -> Result<(), String> {
            self.0.lock().unwrap().push(format!("{faults:?}"));
            Ok(())
        }
    }

    #[test]
    fn links_are_controlled() {
        let device = Arc::new(Linked::default());
        let control = Control::new(Arc::clone(&device) as Arc<dyn Controlled>);
        let ask = |request: &str| control.answer(request.as_bytes());
        for good in [
            r#"{"link":"down"}"#,
            r#"{"link":"up"}"#,
            r#"{"link":{"delay_us":5,"loss":0.5}}"#,
            r#"{"link":{}}"#,
            r#"{"reset":"counters"}"#,
        ] {
            assert_eq!(ask(good), json!({"ok": true}), "{good}");
        }
        let faults = |delay_us, loss| LinkFaults {
            delay_us,
            loss,
            ..LinkFaults::default()
        };
        assert_eq!(
            *device.0.lock().unwrap(),
            [
                "false".to_owned(),
                "true".into(),
                format!("{:?}", faults(5, 0.5)),
                format!("{:?}", faults(0, 0.0))
            ]
        );
        for (bad, error) in [
            (r#"{"hold":{"qpn":64}}"#, "holds no transfer"),
            (r#"{"hold":"release"}"#, "holds no transfer"),
            (r#"{"hold":"it"}"#, "must be"),
            (r#"{"hold":{"length":1}}"#, "hold: unknown field `length`"),
            (r#"{"get":"hold"}"#, "holds no transfer"),
            (r#"{"drain":false}"#, "no memory keys"),
            (r#"{"link":"sideways"}"#, "must be"),
            (r#"{"link":7}"#, "must be"),
            (r#"{"link":{"loss":1.5}}"#, "from 0 to 1"),
            (r#"{"link":{"reorder":-1}}"#, "from 0 to 1"),
            (r#"{"link":{"delay":1}}"#, "unknown field"),
            (r#"{"fail":1}"#, "cannot look broken"),
            (r#"{"fail":256}"#, "256"),
            (r#"{"get":"counters"}"#, "no answer"),
        ] {
            let answer = ask(bad);
            assert_eq!(answer["ok"], false, "{bad}");
            assert!(answer["error"].as_str().unwrap().contains(error), "{bad}: {answer}");
        }
    }

    #[test]
    fn presence_is_part_of_the_state() {
        let control = Control::new(Arc::new(Linked::default()));
        let state = |control: &Control| control.answer(br#"{"get":"state"}"#)["state"].clone();
        assert_eq!(
            state(&control),
            json!({"link": true, "connected": false, "dead": false})
        );
        control.set_connected(true);
        control.clone().set_dead();
        assert_eq!(state(&control), json!({"link": true, "connected": true, "dead": true}));
    }
}

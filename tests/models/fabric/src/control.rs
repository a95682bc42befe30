// SPDX-License-Identifier: MIT OR Apache-2.0

//! The control socket: counters, state and injected faults of a device, for programs outside of the guest.
//!
//! Requests and responses are JSON objects, one per line. Requests: `{"get":"counters"}`, `{"get":"state"}`,
//! `{"reset":"counters"}`. Devices with a network link: `{"link":"up"}`, `{"link":"down"}`,
//! `{"link":{"delay_us":100,"loss":0.01}}` (see [`LinkFaults`]); `{"rate":12582912}` sets the link's rate in bytes per second, and
//! `{"rate":null}` makes it a link without a rate. Devices that can report a health syndrome:
//! `{"fail":1}`. Devices that can hold a transfer in flight: `{"hold":{"qpn":64,"write":true,"min_bytes":4096}}` (see
//! [`HeldTransfer`]), `{"hold":"release"}`, `{"get":"hold"}`; and `{"drain":false}`, after which changes of memory keys
//! do not wait for transfers. `{"trace":1000}` starts a trace of that many steps, and `{"get":"trace"}` ends it and returns the
//! steps. A response has `"ok":true` and the requested value under its name, or `"ok":false` and
//! `"error"`.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use p2pmem_vfio_user::Listener;
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::warn;

/// Maximum length of a request.
const MAX_LINE: u64 = 64 << 10;
/// Time without a request after which a connection is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// The interface of a device to the control socket. An error is the message of the response.
pub trait ControlTarget: Send + Sync {
    /// Returns the counters by name, as a JSON object. A value may be an object of counters.
    ///
    /// # Errors
    ///
    /// The device does not respond.
    fn counters(&self) -> Result<Value, String>;

    /// Sets the counters to 0.
    ///
    /// # Errors
    ///
    /// The device does not respond.
    fn reset_counters(&self) -> Result<(), String>;

    /// Returns the state of the device, as a JSON object.
    ///
    /// # Errors
    ///
    /// The device does not respond.
    fn state(&self) -> Result<Value, String>;

    /// Sets the network link up or down.
    ///
    /// # Errors
    ///
    /// The device has no link or does not respond.
    fn set_link(&self, up: bool) -> Result<(), String> {
        let _ = up;
        Err("this device has no link".into())
    }

    /// Sets the faults of the network link.
    ///
    /// # Errors
    ///
    /// The device has no link or does not respond.
    fn set_faults(&self, faults: LinkFaults) -> Result<(), String> {
        let _ = faults;
        Err("this device has no link".into())
    }

    /// Sets the rate of the network link in bytes per second; `None` for a link without a rate.
    ///
    /// # Errors
    ///
    /// The device has no link or does not respond.
    fn set_rate(&self, bytes_per_second: Option<NonZeroU64>) -> Result<(), String> {
        let _ = bytes_per_second;
        Err("this device has no link".into())
    }

    /// Holds the next matching transfer in flight, or with `None`, releases the held transfer.
    ///
    /// # Errors
    ///
    /// The device cannot hold transfers.
    fn hold(&self, transfer: Option<HeldTransfer>) -> Result<(), String> {
        let _ = transfer;
        Err("this device cannot hold transfers".into())
    }

    /// Returns the held transfer, as a JSON object.
    ///
    /// # Errors
    ///
    /// The device cannot hold transfers.
    fn held(&self) -> Result<Value, String> {
        Err("this device cannot hold transfers".into())
    }

    /// Sets whether changes of a memory key wait for transfers by that key.
    ///
    /// # Errors
    ///
    /// The device has no memory keys.
    fn set_drain(&self, on: bool) -> Result<(), String> {
        let _ = on;
        Err("this device has no memory keys".into())
    }

    /// Starts a trace of the device's steps, at most `most`.
    ///
    /// # Errors
    ///
    /// The device has no trace.
    fn start_trace(&self, most: usize) -> Result<(), String> {
        let _ = most;
        Err("this device has no trace".into())
    }

    /// Ends the trace, and returns its steps as a JSON object.
    ///
    /// # Errors
    ///
    /// The device has no trace.
    fn take_trace(&self) -> Result<Value, String> {
        Err("this device has no trace".into())
    }

    /// Makes the device report a health syndrome to its driver.
    ///
    /// # Errors
    ///
    /// The device cannot report a health syndrome.
    fn fail(&self, syndrome: u8) -> Result<(), String> {
        let _ = syndrome;
        Err("this device cannot report a health syndrome".into())
    }
}

/// Selects the transfer to hold. A missing field matches any transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HeldTransfer {
    /// Queue pair number.
    pub qpn: Option<u32>,
    /// Whether the transfer writes to memory.
    pub write: Option<bool>,
    /// Minimum length in bytes.
    pub min_bytes: u64,
}

/// Faults of a network link. The default of each is no fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LinkFaults {
    /// Delay of each packet, in microseconds.
    pub delay_us: u32,
    /// Fraction of packets that are lost, 0 to 1.
    pub loss: f64,
    /// Number of the packet that is lost, counted from this request on; 0 for none.
    pub lose_nth: u64,
    /// Fraction of packets that arrive twice, 0 to 1.
    pub duplicate: f64,
    /// Fraction of packets that are swapped with the next one, 0 to 1.
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
    Get(GetKind),
    Reset(ResetKind),
    Link(Value),
    Rate(Option<NonZeroU64>),
    Hold(Value),
    Drain(bool),
    Trace(usize),
    Fail(u8),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum GetKind {
    Counters,
    State,
    Hold,
    Trace,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum ResetKind {
    Counters,
}

/// Whether a client is connected, and whether the device has failed.
#[derive(Debug, Default)]
struct DeviceStatus {
    connected: AtomicBool,
    dead: AtomicBool,
}

/// Handles requests for one device. Clones refer to the same device.
#[derive(Clone)]
pub struct Control {
    device: Arc<dyn ControlTarget>,
    status: Arc<DeviceStatus>,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("status", &self.status).finish()
    }
}

impl Control {
    /// Handles requests for `device`.
    pub fn new(device: Arc<dyn ControlTarget>) -> Self {
        Self {
            device,
            status: Arc::default(),
        }
    }

    /// Sets whether a client is connected. Part of the state that requests read.
    pub fn set_connected(&self, connected: bool) {
        self.status.connected.store(connected, Ordering::Relaxed);
    }

    /// Sets that the device has panicked and is not served any more. Part of the state that requests read.
    pub fn set_dead(&self) {
        self.status.dead.store(true, Ordering::Relaxed);
    }

    /// Listens at `path`, and serves each connection on a thread of its own until the process ends.
    ///
    /// # Errors
    ///
    /// The socket or the thread cannot be created.
    pub fn listen(self, path: &Path) -> io::Result<()> {
        let listener = Listener::bind(path)?;
        std::thread::Builder::new().name("control".into()).spawn(move || {
            loop {
                let answer = listener.accept().and_then(|stream| {
                    let control = self.clone();
                    std::thread::Builder::new().name("control".into()).spawn(move || {
                        if let Err(error) = control.serve_connection(&stream) {
                            warn!(%error, "control connection failed");
                        }
                    })
                });
                if let Err(error) = answer {
                    warn!(%error, "cannot accept control connections any more");
                    return;
                }
            }
        })?;
        Ok(())
    }

    fn serve_connection(&self, stream: &UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(IDLE_TIMEOUT))?;
        stream.set_write_timeout(Some(IDLE_TIMEOUT))?;
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
                self.handle_request(&line).to_string()
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

    /// Handles one request, and returns the response.
    pub fn handle_request(&self, request: &[u8]) -> Value {
        let answer = serde_json::from_slice(request)
            .map_err(|error| error.to_string())
            .and_then(|request| self.execute(request));
        match answer {
            Ok(None) => json!({"ok": true}),
            Ok(Some((name, value))) => json!({"ok": true, name: value}),
            Err(error) => json!({"ok": false, "error": error}),
        }
    }

    fn execute(&self, request: Request) -> Result<Option<(&'static str, Value)>, String> {
        match request {
            Request::Get(GetKind::Counters) => Ok(Some(("counters", self.counters()?))),
            Request::Get(GetKind::State) => Ok(Some(("state", self.state()?))),
            Request::Get(GetKind::Hold) => Ok(Some(("hold", self.device.held()?))),
            Request::Get(GetKind::Trace) => Ok(Some(("trace", self.device.take_trace()?))),
            Request::Trace(most) => self.device.start_trace(most).map(|()| None),
            Request::Hold(Value::String(word)) if word == "release" => self.device.hold(None).map(|()| None),
            Request::Hold(transfer @ Value::Object(_)) => {
                let transfer = serde_json::from_value(transfer).map_err(|error| format!("hold: {error}"))?;
                self.device.hold(Some(transfer)).map(|()| None)
            }
            Request::Hold(other) => Err(format!(
                "hold is {other}: it must be \"release\" or an object that selects a transfer"
            )),
            Request::Drain(on) => self.device.set_drain(on).map(|()| None),
            Request::Reset(ResetKind::Counters) => self.device.reset_counters().map(|()| None),
            Request::Rate(rate) => self.device.set_rate(rate).map(|()| None),
            Request::Link(Value::String(word)) if word == "up" => self.device.set_link(true).map(|()| None),
            Request::Link(Value::String(word)) if word == "down" => self.device.set_link(false).map(|()| None),
            Request::Link(faults @ Value::Object(_)) => {
                let faults: LinkFaults = serde_json::from_value(faults).map_err(|error| format!("link: {error}"))?;
                self.device.set_faults(faults.check()?).map(|()| None)
            }
            Request::Link(other) => Err(format!(
                "link is {other}: it must be \"up\", \"down\" or an object with faults"
            )),
            Request::Fail(syndrome) => self.device.fail(syndrome).map(|()| None),
        }
    }

    /// Returns the counters by name, as a JSON object. A value may be an object of counters.
    ///
    /// # Errors
    ///
    /// The device does not respond.
    pub fn counters(&self) -> Result<Value, String> {
        self.device.counters()
    }

    fn state(&self) -> Result<Value, String> {
        let mut state = self.device.state()?;
        state["connected"] = json!(self.status.connected.load(Ordering::Relaxed));
        state["dead"] = json!(self.status.dead.load(Ordering::Relaxed));
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// A device that records the requests for its link.
    #[derive(Default)]
    struct RecordingDevice(Mutex<Vec<String>>);

    impl ControlTarget for RecordingDevice {
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
        fn set_rate(&self, bytes_per_second: Option<NonZeroU64>) -> Result<(), String> {
            self.0.lock().unwrap().push(format!("{bytes_per_second:?}"));
            Ok(())
        }
        fn set_faults(&self, faults: LinkFaults) -> Result<(), String> {
            self.0.lock().unwrap().push(format!("{faults:?}"));
            Ok(())
        }
    }

    #[test]
    fn link_requests_are_applied() {
        let device = Arc::new(RecordingDevice::default());
        let control = Control::new(Arc::clone(&device) as Arc<dyn ControlTarget>);
        let request = |request: &str| control.handle_request(request.as_bytes());
        for good in [
            r#"{"link":"down"}"#,
            r#"{"link":"up"}"#,
            r#"{"link":{"delay_us":5,"loss":0.5}}"#,
            r#"{"link":{}}"#,
            r#"{"rate":5}"#,
            r#"{"rate":null}"#,
            r#"{"reset":"counters"}"#,
        ] {
            assert_eq!(request(good), json!({"ok": true}), "{good}");
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
                format!("{:?}", faults(0, 0.0)),
                "Some(5)".into(),
                "None".into(),
            ]
        );
        for (bad, error) in [
            (r#"{"hold":{"qpn":64}}"#, "cannot hold transfers"),
            (r#"{"hold":"release"}"#, "cannot hold transfers"),
            (r#"{"hold":"it"}"#, "must be"),
            (r#"{"hold":{"length":1}}"#, "hold: unknown field `length`"),
            (r#"{"get":"hold"}"#, "cannot hold transfers"),
            (r#"{"drain":false}"#, "no memory keys"),
            (r#"{"trace":1}"#, "no trace"),
            (r#"{"trace":-1}"#, "invalid value"),
            (r#"{"get":"trace"}"#, "no trace"),
            (r#"{"link":"sideways"}"#, "must be"),
            (r#"{"link":7}"#, "must be"),
            (r#"{"link":{"loss":1.5}}"#, "from 0 to 1"),
            (r#"{"link":{"reorder":-1}}"#, "from 0 to 1"),
            (r#"{"link":{"delay":1}}"#, "unknown field"),
            (r#"{"rate":0}"#, "nonzero"),
            (r#"{"rate":"12M"}"#, "invalid type"),
            (r#"{"fail":1}"#, "cannot report a health syndrome"),
            (r#"{"fail":256}"#, "256"),
            (r#"{"get":"counters"}"#, "no answer"),
        ] {
            let answer = request(bad);
            assert_eq!(answer["ok"], false, "{bad}");
            assert!(answer["error"].as_str().unwrap().contains(error), "{bad}: {answer}");
        }
    }

    #[test]
    fn state_has_connected_and_dead() {
        let control = Control::new(Arc::new(RecordingDevice::default()));
        let state = |control: &Control| control.handle_request(br#"{"get":"state"}"#)["state"].clone();
        assert_eq!(
            state(&control),
            json!({"link": true, "connected": false, "dead": false})
        );
        control.set_connected(true);
        control.clone().set_dead();
        assert_eq!(state(&control), json!({"link": true, "connected": true, "dead": true}));
    }
}

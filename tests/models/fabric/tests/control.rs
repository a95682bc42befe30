// SPDX-License-Identifier: MIT OR Apache-2.0

//! The control socket of a device: requests, responses, and the names in them.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use p2pmem_accel::{Accel, Settings};
use p2pmem_accel_regs::Counter;
use p2pmem_fabric::control::Control;
use serde_json::{Value, json};

const SIZE: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(120);

fn accel() -> Accel {
    Accel::new(Settings {
        memory: SIZE,
        ..Settings::default()
    })
    .unwrap()
}

#[test]
fn control_requests_are_checked() {
    let accel = accel();
    let control = Control::new(accel.shared());
    for bad in [
        &b"{}"[..],
        b"",
        b"{\"get\":\"all\"}",
        b"{\"set\":1}",
        b"\xff\xfe",
        b"{\"get\":\"state\",\"reset\":\"counters\"}",
    ] {
        let answer = control.handle_request(bad);
        assert_eq!(answer["ok"], false, "{}", String::from_utf8_lossy(bad));
        assert!(answer["error"].is_string());
    }
    let state = control.handle_request(b"{\"get\":\"state\"}\n");
    assert_eq!(state["state"]["memory"], SIZE);
    assert_eq!(state["state"]["bar2_address"], Value::Null);
    let counters = control.handle_request(b"{\"get\":\"counters\"}");
    for (_, name) in Counter::ALL {
        assert_eq!(counters["counters"][name], 0, "{name}");
    }
    assert_eq!(
        counters["counters"]["by_target"]["host"],
        json!({"read": 0, "written": 0})
    );
    assert_eq!(control.handle_request(b"{\"reset\":\"counters\"}")["ok"], true);
}

#[test]
fn control_socket_answers_line_by_line() {
    let accel = accel();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control");
    Control::new(accel.shared()).listen(&path).unwrap();
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    for request in ["{\"get\":\"counters\"}", "nonsense", "{\"get\":\"state\"}"] {
        writeln!(stream, "{request}").unwrap();
        let answer: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(answer["ok"], request != "nonsense");
    }
    // A line without an end is rejected at the maximum length, and the connection is closed.
    let _ = stream.write_all(&vec![b'x'; 70_000]);
    let answer: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(answer["error"], "the request is too long");
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! The fabric process: devices access each other's memory, a failing device does not affect the others, and a signal
//! ends all of them.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use p2pmem_accel_regs::{Op, Status, reg, result_entry};
use p2pmem_vfio_user::client::Client;
use p2pmem_vfio_user::proto::CONFIG_REGION;
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(120);
/// Bus address of the first BAR in each guest.
const WINDOW: u64 = 0x10_0000_0000;

struct Fabric {
    process: Child,
    folder: tempfile::TempDir,
}

impl Fabric {
    /// Starts a process with the configuration `text`, in which DIR is replaced by the folder of the sockets, and waits
    /// until the process listens.
    fn start(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = text.replace("DIR", &folder.path().display().to_string());
        let config = folder.path().join("fabric.toml");
        std::fs::write(&config, text).unwrap();
        let mut process = program(&config).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert_eq!(line, format!("ready {}\n", config.display()));
        Self { process, folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn connect(&self, name: &str) -> Client {
        let mut client = Client::new(UnixStream::connect(self.path(&format!("{name}.sock"))).unwrap()).unwrap();
        client.version().unwrap();
        client
    }

    fn control_request(&self, name: &str, request: &Value) -> Value {
        let mut stream = UnixStream::connect(self.path(&format!("{name}.ctl"))).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        writeln!(stream, "{request}").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn counter(&self, name: &str, counter: &str) -> u64 {
        let answer = self.control_request(name, &json!({"get": "counters"}));
        answer["counters"][counter]
            .as_u64()
            .unwrap_or_else(|| panic!("{answer}"))
    }

    /// Sends the signal and waits for the end of the process. Fails if the exit status is not 0.
    fn terminate(&mut self, signal: rustix::process::Signal) {
        let id = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(id, signal).unwrap();
        let deadline = Instant::now() + TIMEOUT;
        let status = loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "the process does not end");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(status.success(), "{status}");
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // Fails if the process has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn program(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_p2pmem-fabric"));
    command.arg("--config").arg(config);
    command
}

const ACCELS: &str = r#"
    [[node]]
    name = "a"
    [[node.accel]]
    name = "accel0"
    socket = "DIR/accel0.sock"
    control = "DIR/accel0.ctl"
    counters = "DIR/accel0.json"
    memory = "1M"
    [[node.accel]]
    name = "accel1"
    socket = "DIR/accel1.sock"
    control = "DIR/accel1.ctl"
    counters = "DIR/accel1.json"
    memory = "1M"
    [[node]]
    name = "b"
    [[node.accel]]
    name = "accel0"
    socket = "DIR/b.sock"
    control = "DIR/b.ctl"
    memory = "1M"
"#;

const NICS: &str = r#"
    [[node]]
    name = "a"
    [[node.nic]]
    name = "nic0"
    socket = "DIR/nic0.sock"
    control = "DIR/nic0.ctl"
    counters = "DIR/nic0.json"
    [[node.accel]]
    name = "accel0"
    socket = "DIR/accel0.sock"
    memory = "1M"
    [[node]]
    name = "b"
    [[node.nic]]
    name = "nic0"
    socket = "DIR/b.sock"
    control = "DIR/b.ctl"
"#;

/// Enables bus mastering and a device's memory at `address`, and maps 1 GiB from `WINDOW` on without a file descriptor.
fn bring_up(client: &mut Client, address: u64) {
    client
        .write(CONFIG_REGION, 0x18, &(address as u32).to_le_bytes())
        .unwrap();
    client
        .write(CONFIG_REGION, 0x1c, &((address >> 32) as u32).to_le_bytes())
        .unwrap();
    client.write(CONFIG_REGION, 4, &[6, 0]).unwrap();
    client.dma_map(WINDOW, 1 << 30, None).unwrap();
}

/// Runs an operation of an accelerator, and returns its status.
fn run(client: &mut Client, op: Op, length: u64, argument: u64) -> Status {
    for (register, value) in [
        (reg::OP, op as u64),
        (reg::OFFSET, 0),
        (reg::LENGTH, length),
        (reg::ARGUMENT, argument),
    ] {
        client.write(0, register, &value.to_le_bytes()).unwrap();
    }
    client.write(0, reg::DOORBELL, &[1, 0, 0, 0]).unwrap();
    let seq = client.read32(0, reg::SUBMITTED).unwrap();
    client
        .poll32(0, reg::COMPLETED, TIMEOUT, |completed| completed == seq)
        .unwrap();
    let status = client.read32(0, result_entry(seq) + 4).unwrap();
    Status::from_u32(status).unwrap()
}

#[test]
fn accelerators_of_one_guest_reach_each_other() {
    let fabric = Fabric::start(ACCELS);
    let (mut first, mut second, mut other) = (fabric.connect("accel0"), fabric.connect("accel1"), fabric.connect("b"));
    bring_up(&mut first, WINDOW);
    bring_up(&mut second, WINDOW + (1 << 20));
    // The same address in another guest is other memory.
    bring_up(&mut other, WINDOW + (1 << 20));
    assert_eq!(run(&mut first, Op::Pattern, 1 << 20, 7), Status::Ok);
    assert_eq!(run(&mut first, Op::DmaOut, 1 << 20, WINDOW + (1 << 20)), Status::Ok);
    let (mut here, mut there) = (vec![0; 4096], vec![0; 4096]);
    first.read(2, (1 << 20) - 4096, &mut here).unwrap();
    second.read(2, (1 << 20) - 4096, &mut there).unwrap();
    assert!(here == there && here.iter().any(|byte| *byte != 0));
    other.read(2, (1 << 20) - 4096, &mut there).unwrap();
    assert!(there.iter().all(|byte| *byte == 0));
    assert_eq!(fabric.counter("accel0", "peer_written"), 1 << 20);
    assert_eq!(fabric.counter("accel0", "message_written"), 0);
    // A client that disconnects does not affect the other devices, and another client can connect.
    drop(second);
    let deadline = Instant::now() + TIMEOUT;
    let state = |name| fabric.control_request(name, &json!({"get": "state"}))["state"].clone();
    while state("accel1")["connected"] == true {
        assert!(Instant::now() < deadline, "{}", state("accel1"));
    }
    assert_eq!(
        run(&mut first, Op::DmaOut, 4096, WINDOW + (1 << 20)),
        Status::Unreachable
    );
    let mut second = fabric.connect("accel1");
    bring_up(&mut second, WINDOW + (1 << 20));
    assert_eq!(run(&mut first, Op::DmaOut, 4096, WINDOW + (1 << 20)), Status::Ok);
    assert_eq!(state("accel0")["bar2_address"], WINDOW);
    let refused = fabric.control_request("accel0", &json!({"link": "down"}));
    assert_eq!(refused["error"], "this device has no link");
}

#[test]
fn delayed_writes_arrive_behind_those_of_other_devices() {
    let fabric = Fabric::start(&ACCELS.replacen(
        "memory = \"1M\"",
        "memory = \"1M\"\nsecond_memory = \"2M\"\ndelayed_writes = true",
        1,
    ));
    let (mut late, mut other) = (fabric.connect("accel0"), fabric.connect("accel1"));
    bring_up(&mut late, WINDOW);
    // The emulator maps no memory for other devices that the processor's accesses do not reach directly.
    bring_up(&mut other, WINDOW + (1 << 20));
    other.dma_unmap(WINDOW, 1 << 30).unwrap();
    assert_eq!(late.region_info(5).unwrap().0.size, 2 << 20);
    assert_eq!(run(&mut other, Op::Pattern, 4096, 7), Status::Ok);
    late.write(2, 0, &[0; 8]).unwrap();
    assert_eq!(run(&mut other, Op::DmaOut, 4096, WINDOW), Status::Ok);
    assert_eq!(fabric.counter("accel1", "peer_written"), 4096);
    let (mut sent, mut found) = ([0; 4096], [0; 4096]);
    other.read(2, 0, &mut sent).unwrap();
    late.read(2, 0, &mut found).unwrap();
    assert_eq!(found[..8], [0; 8]);
    assert_eq!(found[8..], sent[8..]);
    assert_ne!(sent[..8], [0; 8]);
}

#[test]
fn nics_are_served_and_controlled() {
    let mut fabric = Fabric::start(NICS);
    let mut nic = fabric.connect("nic0");
    assert_eq!(nic.read32(CONFIG_REGION, 0).unwrap(), 0x101b_15b3);
    let state = |name| {
        let answer = fabric.control_request(name, &json!({"get": "state"}));
        assert_eq!(answer["ok"], true, "{answer}");
        answer["state"].clone()
    };
    let (first, second) = (state("nic0"), state("b"));
    assert_eq!((&first["link"], &second["link"]), (&json!(true), &json!(true)));
    assert_eq!(
        (&first["connected"], &second["connected"]),
        (&json!(true), &json!(false))
    );
    for request in [
        json!({"link": {"delay_us": 10, "loss": 0.1}}),
        json!({"link": {}}),
        json!({"link": "down"}),
        json!({"reset": "counters"}),
    ] {
        assert_eq!(
            fabric.control_request("nic0", &request),
            json!({"ok": true}),
            "{request}"
        );
    }
    assert_eq!(
        (state("nic0")["link"].clone(), state("b")["link"].clone()),
        (json!(false), json!(true))
    );
    assert_eq!(
        fabric.control_request("nic0", &json!({"link": "up"})),
        json!({"ok": true})
    );
    assert_eq!(state("nic0")["link"], true);
    let counters = fabric.control_request("b", &json!({"get": "counters"}))["counters"].clone();
    for group in ["payload", "bus", "wire", "transport", "adapter", "registers"] {
        assert!(!counters[group].is_null(), "{group} in {counters}");
    }
    assert_eq!(counters["payload"]["host_written"], 0);
    fabric.terminate(rustix::process::Signal::TERM);
    let text = std::fs::read(fabric.path("nic0.json")).unwrap();
    let counters: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(counters["bus"]["host"], json!({"read": 0, "written": 0}));
}

#[test]
fn malformed_client_does_not_affect_others() {
    let fabric = Fabric::start(ACCELS);
    let mut first = fabric.connect("accel0");
    let mut invalid = UnixStream::connect(fabric.path("accel1.sock")).unwrap();
    invalid.write_all(&[0xff; 64]).unwrap();
    invalid.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut rest = Vec::new();
    let _ = invalid.read_to_end(&mut rest);
    assert_eq!(run(&mut first, Op::Nop, 0, 0), Status::Ok);
    fabric.connect("accel1");
}

#[test]
fn signal_ends_all_devices() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let mut fabric = Fabric::start(ACCELS);
        let mut first = fabric.connect("accel0");
        assert_eq!(run(&mut first, Op::Fill, 4096, 1), Status::Ok);
        fabric.terminate(signal);
        let mut data = [0; 4];
        assert!(first.read(0, 0, &mut data).is_err());
        for name in ["accel0", "accel1", "b"] {
            assert!(!fabric.path(&format!("{name}.sock")).exists());
            assert!(!fabric.path(&format!("{name}.ctl")).exists());
        }
        let counters = |name: &str| -> Value {
            serde_json::from_slice(&std::fs::read(fabric.path(&format!("{name}.json"))).unwrap()).unwrap()
        };
        assert_eq!(counters("accel0")["compute_written"], 4096);
        assert_eq!(counters("accel1")["compute_written"], 0);
    }
}

#[test]
fn startup_errors_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("fabric.toml");
    let attempt = |text: &str| {
        std::fs::write(&config, text).unwrap();
        let output = program(&config).output().unwrap();
        assert!(!output.status.success() && output.stdout.is_empty());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(attempt("").contains("no devices"));
    assert!(attempt("[[node]]\nname = 3").contains("expected a string"));
    let apart = format!("[[switch]]\nname = \"sw\"\n[[switch]]\nname = \"far\"\n{NICS}");
    assert!(attempt(&apart).contains("no path from switch"));
    let far = ACCELS.replace("DIR", "/nonexistent");
    let error = attempt(&far);
    assert!(
        error.contains("device \"accel0\"") && error.contains("/nonexistent/accel0"),
        "{error}"
    );
}

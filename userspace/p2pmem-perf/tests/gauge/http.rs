// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the interface for programs, by real connections.

use serde_json::{json, Value};

use crate::{Bed, TOKEN};

/// So many messages that a run ends only if it is stopped.
const ENDLESS: u64 = 10_000_000;

fn run(messages: u64) -> Value {
    json!({
        "memory": "accelerator", "peer_memory": "cpu", "mode": "write", "size": "2M", "messages": messages,
        "nics": ["mlx5_0", "mlx5_1"],
    })
}

fn matrix(memory: &[&str]) -> Value {
    json!({
        "memory": memory, "peer_memory": memory, "modes": ["write", "read"], "size": "64K,1M", "messages": 200,
        "nics": ["mlx5_0"], "staged": true,
    })
}

/// Returns a changed copy.
fn with(mut value: Value, name: &str, other: Value) -> Value {
    value[name] = other;
    value
}

impl Bed {
    fn start(&self, path: &str, body: &Value) -> u64 {
        let reply = self.call("POST", path, &body.to_string());
        assert_eq!(reply.status, 202, "{reply:?}");
        reply.json()["id"].as_u64().unwrap()
    }

    /// Waits until the state fulfills a condition, and returns the state.
    fn until(&self, condition: impl Fn(&Value) -> bool) -> Value {
        let mut events = self.events(("Authorization", &self.bearer()));
        events.find(|state| condition(state)).expect("the event stream ended")
    }

    fn until_idle(&self) -> Value {
        self.until(|state| state["job"].is_null())
    }

    fn stop(&self, id: u64) {
        let reply = self.call("POST", &format!("/api/jobs/{id}/stop"), "");
        assert_eq!(reply.status, 204, "{reply:?}");
    }
}

#[test]
fn every_path_needs_a_login() {
    let bed = Bed::new();
    for (method, path) in [
        ("GET", "/api/status"),
        ("GET", "/api/events"),
        ("POST", "/api/run"),
        ("POST", "/api/matrix"),
        ("POST", "/api/jobs/1/stop"),
        ("GET", "/api/export.json"),
        ("GET", "/api/export.csv"),
        ("GET", "/api/unknown"),
    ] {
        let body = run(1).to_string();
        let json = ("Content-Type", "application/json");
        let reply = bed.request(method, path, &[json], &body);
        assert!(reply.error(401).contains("log in"), "{method} {path}");
    }
    assert!(bed.log_in("a wrong token of 16").body.contains("the token is wrong"));
    assert!(bed.call("GET", "/api/status", "").json()["job"].is_null());
    let reason = bed.call("GET", "/api/unknown", "").error(404);
    assert!(reason.contains("Documentation/userspace.md"), "{reason}");
}

#[test]
fn invalid_requests_are_refused_in_one_line() {
    let bed = Bed::new();
    for (body, expected) in [
        (with(run(1), "memory", json!("tape")), "fpga"),
        (with(run(1), "peer_memory", json!("tape")), "fpga"),
        (with(run(1), "mode", json!("copy")), "write-imm"),
        (with(run(1), "size", json!("0")), "specify"),
        (with(run(1), "size", json!("2G")), "1 GiB"),
        (with(run(1), "size", json!("1M --seed=2")), "specify"),
        (run(0), "specify 1 to 10000000 messages"),
        (run(10_000_001), "specify 1 to 10000000 messages"),
        (with(run(1), "nics", json!([])), "select at least one NIC"),
        (with(run(1), "nics", json!(["mlx5_0,mlx5_1"])), "is no name"),
        (
            with(with(run(1), "mode", json!("read")), "staged", json!(true)),
            "--mode write",
        ),
        (with(run(1), "seed", json!(1)), "not valid"),
    ] {
        let reason = bed.call("POST", "/api/run", &body.to_string()).error(400);
        assert!(reason.contains(expected), "{body}: {reason}");
        assert!(!reason.contains('\n'), "{reason}");
    }
    for (body, expected) in [
        (matrix(&[]), "select memory"),
        (with(matrix(&["cpu"]), "modes", json!([])), "select at least one mode"),
        (with(matrix(&["cpu"]), "messages", json!(0)), "specify 1 to"),
        (matrix(&["cpu", "tape"]), "fpga"),
    ] {
        let reason = bed.call("POST", "/api/matrix", &body.to_string()).error(400);
        assert!(reason.contains(expected), "{body}: {reason}");
    }
    assert_eq!(bed.call("GET", "/api/status", "").json()["results"], json!([]));
}

#[test]
fn a_second_measurement_is_refused_until_the_first_one_is_stopped() {
    let bed = Bed::new();
    let first = bed.start("/api/run", &run(ENDLESS));
    for (path, body) in [("/api/run", run(1)), ("/api/matrix", matrix(&["cpu"]))] {
        let reason = bed.call("POST", path, &body.to_string()).error(409);
        assert!(
            reason.contains("run 1 (accelerator → cpu, write) of the viewer at 127.0.0.1 is in progress; stop it"),
            "{reason}"
        );
    }
    let other = bed.call("POST", "/api/jobs/7/stop", "").error(404);
    assert!(other.contains("measurement 7 does not run"), "{other}");
    // The first rate is after its start.
    let state = bed.until(|state| state["history"].as_array().unwrap().len() > 2);
    assert_eq!(state["job"]["id"], first);
    bed.stop(first);
    let state = bed.until_idle();
    assert_eq!(state["results"][0]["error"], "stopped by the viewer at 127.0.0.1");
    bed.call("POST", &format!("/api/jobs/{first}/stop"), "").error(404);
    let second = bed.start("/api/run", &run(1));
    let state = bed.until_idle();
    assert_eq!((&state["results"][0]["id"], second), (&json!(2), 2));
    assert_eq!(state["results"][0]["error"], Value::Null);
}

#[test]
fn a_run_goes_on_without_viewers_and_a_new_viewer_gets_the_whole_state() {
    let bed = Bed::new();
    let id = bed.start("/api/run", &run(ENDLESS));
    let history = |state: &Value| state["history"].as_array().unwrap().clone();
    let mut viewer = bed.events(("Authorization", &bed.bearer()));
    let mut stays = bed.events(("Authorization", &bed.bearer()));
    let seen = viewer.find(|state| history(state).len() > 2).unwrap();
    drop(viewer);
    // The other viewer sees the run continue.
    let before = history(&seen).len();
    stays.find(|state| history(state).len() > before).unwrap();
    let first = bed.events(("Authorization", &bed.bearer())).next().unwrap();
    assert_eq!(first["job"]["id"], id);
    let all = history(&first);
    assert_eq!(all[..before], history(&seen)[..], "nothing is lost");
    let rate = all[before]["ports"]["mlx5_0"].as_f64().unwrap();
    assert!(rate > 0.0, "{first}");
    assert_eq!(all[before]["pair"], "accelerator → cpu");
    bed.stop(id);
    bed.until_idle();
}

#[test]
fn the_results_before_a_failure_are_kept() {
    let bed = Bed::new();
    bed.script.fail("the other side ended the connection: see its output");
    bed.start("/api/run", &with(run(1), "size", json!("4K,64K,2M")));
    let state = bed.until_idle();
    let ended = &state["results"][0];
    assert_eq!(ended["error"], "the other side ended the connection: see its output");
    let sizes: Vec<_> = ended["report"]["results"].as_array().unwrap().iter().collect();
    assert_eq!((sizes.len(), &sizes[0]["bytes"]), (1, &json!(4096)));
}

#[test]
fn a_panic_ends_the_measurement_and_the_next_one_starts() {
    let bed = Bed::new();
    bed.script.panic();
    bed.start("/api/run", &run(1));
    let state = bed.until_idle();
    let error = state["results"][0]["error"].as_str().unwrap();
    assert!(error.contains("failed inside"), "{error}");
    bed.start("/api/run", &run(1));
    assert_eq!(bed.until_idle()["results"][0]["error"], Value::Null);
}

#[test]
fn the_cells_of_a_matrix_fill_one_after_the_other() {
    let bed = Bed::new();
    bed.script.release(3);
    let id = bed.start("/api/matrix", &matrix(&["cpu", "pageless"]));
    let entries = |state: &Value| state["matrix"]["entries"].as_array().map_or(0, Vec::len);
    // Two sizes for each pair.
    let state = bed.until(|state| entries(state) == 6);
    assert_eq!(state["job"]["pairs"], json!({"ended": 3, "of": 12}));
    assert_eq!(state["matrix"]["running"], true);
    assert_eq!(state["matrix"]["modes"], json!(["write", "read", "staged"]));
    let failed = &state["matrix"]["entries"][2];
    assert!(failed["error"].as_str().unwrap().contains("struct pages"), "{failed}");
    bed.stop(id);
    let state = bed.until_idle();
    assert_eq!(entries(&state), 6, "the cells stay");
    assert_eq!(state["matrix"]["error"], "stopped by the viewer at 127.0.0.1");
    bed.script.release(100);
    bed.start("/api/matrix", &matrix(&["cpu", "pageless"]));
    let state = bed.until_idle();
    assert_eq!((entries(&state), &state["matrix"]["running"]), (24, &json!(false)));
    assert_eq!(state["matrix"]["error"], Value::Null);
}

#[test]
fn results_are_exported_as_json_and_csv() {
    let bed = Bed::new();
    bed.start("/api/run", &with(run(1), "size", json!("4K,2M")));
    bed.until_idle();
    bed.start("/api/matrix", &matrix(&["cpu", "pageless"]));
    bed.until_idle();
    let reply = bed.call("GET", "/api/export.json", "");
    let name = reply.header("content-disposition").unwrap();
    assert_eq!(name, "attachment; filename=\"p2pmem-gauge.json\"");
    let all = reply.json();
    assert_eq!((&all["schema"], &all["server"]), (&json!(1), &json!("node-b:18520")));
    assert_eq!(all["runs"].as_array().unwrap().len(), 1);
    assert_eq!(all["runs"][0]["report"]["results"][1]["bytes"], 2 << 20);
    assert_eq!(all["matrix"]["entries"].as_array().unwrap().len(), 24);

    let reply = bed.call("GET", "/api/export.csv", "");
    assert_eq!(reply.header("content-type"), Some("text/csv; charset=utf-8"));
    let lines: Vec<_> = reply.body.lines().collect();
    // A header, a line for each size of each NIC and of all, and one for each pair and size.
    assert_eq!(lines.len(), 1 + 2 * 3 + 24, "{}", reply.body);
    let columns = lines[0].split(',').count();
    for line in &lines[1..] {
        assert_eq!(line.split(',').count(), columns, "{line}");
    }
    assert!(
        lines[1].starts_with("run,1,accelerator,cpu,write,all,4096,"),
        "{}",
        lines[1]
    );
    assert!(
        lines[2].starts_with("run,1,accelerator,cpu,write,mlx5_0,4096,"),
        "{}",
        lines[2]
    );
    let failed = lines.iter().find(|line| line.contains(",pageless,write,")).unwrap();
    assert!(failed.contains("struct pages"), "{failed}");
}

#[test]
fn only_a_page_of_the_gauge_can_start_a_measurement_with_a_cookie() {
    let bed = Bed::new();
    let cookie = bed.cookie();
    assert!(cookie.starts_with("p2pmem-perf-login="), "{cookie}");
    let json = ("Content-Type", "application/json");
    let other = ("Origin", "http://other");
    let reply = bed.request(
        "POST",
        "/api/run",
        &[("Cookie", &cookie), json, other],
        &run(1).to_string(),
    );
    assert!(reply.error(403).contains("another site"));
    assert!(bed.call("GET", "/api/status", "").json()["job"].is_null());
    assert!(!format!("{:?}", p2pmem_web::Access::new(TOKEN)).contains(TOKEN));
}

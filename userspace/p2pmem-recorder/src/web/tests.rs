// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the interface, by real connections.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::{mpsc, Arc};
use std::time::Duration;

use p2pmem_web::{Access, ApiError, MAX_BODY, MAX_STREAMS};

use http::{Events, HttpClient, BOUND, JSON};

use super::{serve, Server, WebOptions};
use crate::node::{Node, NodeOptions, SessionOptions};
use crate::status::{Direction, Limit};
use crate::store::{self, ChannelName, LunOptions, StreamOptions};

#[path = "../../../p2pmem-web/tests/harness/http.rs"]
mod http;

const TOKEN: &str = "a token of the tests";

struct Bed {
    folder: tempfile::TempDir,
    node: Arc<Node>,
    server: Server,
    client: HttpClient,
}

impl std::ops::Deref for Bed {
    type Target = HttpClient;

    fn deref(&self) -> &HttpClient {
        &self.client
    }
}

impl Bed {
    fn new() -> Self {
        Self::with(&WebOptions::new(TOKEN))
    }

    fn with(options: &WebOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut node = NodeOptions::new("bed", [folder.path()]);
        node.cached = true;
        let node = Node::open(node).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = serve(Arc::clone(&node), listener, options).unwrap();
        let client = HttpClient {
            address: server.address(),
            token: TOKEN,
        };
        Self {
            folder,
            node,
            server,
            client,
        }
    }

    fn lun(&self) -> LunOptions {
        LunOptions::new([self.folder.path()]).segment_size(1 << 20).segments(2)
    }

    fn lun_json(&self, name: &str) -> String {
        let drive = self.folder.path();
        serde_json::json!({"name": name, "drives": [drive], "segment_size": 1 << 20, "segments": 2}).to_string()
    }
}

fn session() -> SessionOptions {
    SessionOptions {
        direction: Direction::Record,
        channel: ChannelName::new("fast", "radar", 0),
        recording: 0,
        peer: "accelerators".into(),
        nic: "mlx5_0".into(),
        memory: "host memory".into(),
        devices: Default::default(),
        block_size: 4096,
        buffers: 8,
    }
}

#[test]
fn a_wrong_token_gives_no_login() {
    let bed = Bed::new();
    for wrong in ["", "a token of the test", "A token of the tests"] {
        let reply = bed.log_in(wrong);
        assert_eq!((reply.status, reply.header("set-cookie")), (401, None), "{wrong}");
        assert!(reply.body.contains("the token is wrong"));
    }
    let form = ("Content-Type", "application/x-www-form-urlencoded");
    assert_eq!(bed.request("POST", "/login", &[form], "").status, 401);
    assert_eq!(bed.request("POST", "/login", &[JSON], "{}").status, 400);
}

#[test]
fn a_login_gives_access_until_logout() {
    let bed = Bed::new();
    let reply = bed.log_in(&format!(" {TOKEN} "));
    assert_eq!((reply.status, reply.header("location")), (303, Some("/")));
    let attributes = reply.header("set-cookie").unwrap();
    for attribute in ["Path=/", "HttpOnly", "SameSite=Strict", "Max-Age=43200"] {
        assert!(attributes.split("; ").any(|other| other == attribute), "{attributes}");
    }
    let cookie = attributes.split(';').next().unwrap();
    assert!(bed.request("GET", "/", &[("Cookie", cookie)], "").body.contains("<h1>"));
    assert_eq!(bed.request("GET", "/api/status", &[("Cookie", cookie)], "").status, 200);
    let origin = format!("http://{}", bed.server.address());
    let reply = bed.request("POST", "/logout", &[("Cookie", cookie), ("Origin", &origin)], "");
    assert_eq!((reply.status, reply.header("location")), (303, Some("/login")));
    assert!(reply.header("set-cookie").unwrap().contains("Max-Age=0"));
    let reply = bed.request("GET", "/", &[("Cookie", cookie)], "");
    assert_eq!((reply.status, reply.header("location")), (303, Some("/login")));
    bed.request("GET", "/api/status", &[("Cookie", cookie)], "").error(401);
}

#[test]
fn behind_a_proxy_with_tls_the_cookie_is_only_sent_encrypted() {
    let bed = Bed::new();
    let form = ("Content-Type", "application/x-www-form-urlencoded");
    let body = format!("token={}", TOKEN.replace(' ', "+"));
    let reply = bed.request("POST", "/login", &[form, ("X-Forwarded-Proto", "https")], &body);
    assert!(reply.header("set-cookie").unwrap().ends_with("; Secure"));
    assert!(!bed.log_in(TOKEN).header("set-cookie").unwrap().contains("Secure"));
}

#[test]
fn an_expired_cookie_gives_no_access() {
    let bed = Bed::with(&WebOptions::new(TOKEN).login_lasts(Duration::ZERO));
    let cookie = bed.cookie();
    bed.request("GET", "/api/status", &[("Cookie", &cookie)], "").error(401);
    assert_eq!(bed.request("GET", "/", &[("Cookie", &cookie)], "").status, 303);
}

#[test]
fn every_path_of_the_interface_needs_a_login() {
    let bed = Bed::new();
    bed.node.create_lun("fast", &bed.lun()).unwrap();
    let recording = "/api/luns/fast/streams/radar/channels/0/recordings/0";
    let requests = [
        ("GET", "/api/status"),
        ("GET", "/api/events"),
        ("POST", "/api/luns"),
        ("DELETE", "/api/luns/fast"),
        ("POST", "/api/luns/fast/streams"),
        ("DELETE", "/api/luns/fast/streams/radar"),
        ("DELETE", recording),
        ("POST", "/api/sessions/0/stop"),
        ("GET", "/api/topology"),
        ("DELETE", "/api/drives/0/errors/0"),
        ("GET", "/api/unknown"),
    ];
    for (method, path) in requests {
        let reply = bed.request(method, path, &[JSON], "{}");
        assert!(reply.error(401).contains("log in"), "{method} {path}");
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
    }
    assert_eq!(bed.node.store().luns().len(), 1);
    bed.request("GET", "/api/status", &[("Authorization", "Bearer wrong")], "")
        .error(401);
    bed.request("GET", "/api/status", &[("Authorization", TOKEN)], "")
        .error(401);
    assert_eq!(bed.call("GET", "/api/status", "").status, 200);
}

#[test]
fn failed_attempts_are_limited_and_logins_stay() {
    let options = WebOptions {
        access: Access::new(TOKEN).attempts_every(Duration::from_secs(3600)),
        ..WebOptions::new(TOKEN)
    };
    let bed = Bed::with(&options);
    let cookie = bed.cookie();
    for _ in 0..10 {
        assert_eq!(bed.log_in("wrong").status, 401);
    }
    let reply = bed.log_in("wrong");
    assert_eq!(reply.status, 429);
    assert!(reply.body.contains("too many attempts"));
    let wait: u64 = reply.header("retry-after").unwrap().parse().unwrap();
    assert!((3500..=3600).contains(&wait), "{wait}");
    assert_eq!(bed.log_in(TOKEN).status, 429, "the right token is refused too");
    bed.call("GET", "/api/status", "").error(429);
    assert_eq!(
        bed.request("GET", "/api/status", &[("Cookie", &cookie)], "").status,
        200
    );
}

#[test]
fn requests_of_other_sites_change_nothing() {
    let bed = Bed::new();
    bed.node.create_lun("fast", &bed.lun()).unwrap();
    let cookie = bed.cookie();
    let cookie = ("Cookie", cookie.as_str());
    let own = format!("http://{}", bed.server.address());
    for header in [
        ("Origin", "http://other"),
        ("Origin", "null"),
        ("Sec-Fetch-Site", "cross-site"),
        ("X-None", ""),
    ] {
        let reply = bed.request("DELETE", "/api/luns/fast", &[cookie, header], "");
        assert!(reply.error(403).contains("another site"), "{header:?}");
    }
    let form = ("Content-Type", "application/x-www-form-urlencoded");
    let body = format!("token={}", TOKEN.replace(' ', "+"));
    bed.request("POST", "/login", &[form, ("Origin", "http://other")], &body)
        .error(403);
    assert_eq!(bed.node.store().luns().len(), 1);
    let reply = bed.request("DELETE", "/api/luns/fast", &[cookie, ("Origin", &own)], "");
    assert_eq!(reply.status, 204);
    assert_eq!(bed.node.store().luns().len(), 0);
}

#[test]
fn invalid_bodies_are_refused() {
    let bed = Bed::new();
    let large = "x".repeat(MAX_BODY + 1);
    assert!(bed.call("POST", "/api/luns", &large).error(413).contains("too large"));
    let bearer = format!("Bearer {TOKEN}");
    let authorization = ("Authorization", bearer.as_str());
    let lun = bed.lun_json("fast");
    for header in [("Content-Type", "text/plain"), ("X-None", "")] {
        let reply = bed.request("POST", "/api/luns", &[authorization, header], &lun);
        assert!(reply.error(415).contains("application/json"));
    }
    for invalid in [
        "",
        "{",
        "[]",
        "{}",
        &lun.replace("segments", "segment"),
        &lun.replace(":2", ":-2"),
    ] {
        let reason = bed.call("POST", "/api/luns", invalid).error(400);
        assert!(reason.contains("not valid"), "{invalid}: {reason}");
    }
    assert_eq!(bed.node.store().luns().len(), 0);
}

#[test]
fn unknown_paths_and_methods_are_json_too() {
    let bed = Bed::new();
    assert!(bed.call("GET", "/api/unknown", "").error(404).contains("no such path"));
    assert!(bed.call("PUT", "/api/luns", "").error(405).contains("method"));
    assert!(bed.call("POST", "/api/sessions/x/stop", "").error(400).contains("path"));
    assert_eq!(bed.call("GET", "/unknown", "").status, 404);
}

#[test]
fn luns_streams_and_recordings_are_created_and_deleted() {
    let bed = Bed::new();
    let mut events = bed.events(("Authorization", &format!("Bearer {TOKEN}")));
    assert_eq!(bed.call("POST", "/api/luns", &bed.lun_json("fast")).status, 202);
    let state = events.find(|state| state["luns"][0]["name"] == "fast").unwrap();
    assert_eq!(state["luns"][0]["total"], 2 << 20);
    assert!(bed
        .call("POST", "/api/luns", &bed.lun_json("fast"))
        .error(409)
        .contains("exists"));
    assert!(bed
        .call("POST", "/api/luns", &bed.lun_json("no good"))
        .error(400)
        .contains("invalid name"));
    let other = bed
        .lun_json("other")
        .replace(bed.folder.path().to_str().unwrap(), "/none");
    assert!(bed.call("POST", "/api/luns", &other).error(404).contains("/none"));
    let none = bed.lun_json("other").replace("\"segments\":2", "\"segments\":0");
    assert!(bed.call("POST", "/api/luns", &none).error(400).contains("segments"));

    let stream = r#"{"name": "radar", "block_size": 65536, "channels": 2}"#;
    assert_eq!(bed.call("POST", "/api/luns/fast/streams", stream).status, 201);
    assert!(bed
        .call("POST", "/api/luns/fast/streams", stream)
        .error(409)
        .contains("exists"));
    assert!(bed
        .call("POST", "/api/luns/none/streams", stream)
        .error(404)
        .contains("none"));
    let large = stream.replace("65536", "1048576").replace("radar", "large");
    bed.call("POST", "/api/luns/fast/streams", &large).error(400);
    events
        .find(|state| state["luns"][0]["streams"][0]["channels"][1]["number"] == 1)
        .unwrap();

    let channel = ChannelName::new("fast", "radar", 0);
    let mut writer = bed.node.store().writer(&channel, 1).unwrap();
    let block = store::Block {
        sequence: 7,
        time: 1,
        checksum: 0,
    };
    writer.write(block, |_, _| Ok::<_, std::io::Error>(())).unwrap();
    assert_eq!(writer.commit().acknowledged, [7]);
    let path = format!(
        "/api/luns/fast/streams/radar/channels/0/recordings/{}",
        writer.recording()
    );
    for path in ["/api/luns/fast", "/api/luns/fast/streams/radar", &path] {
        assert!(bed.call("DELETE", path, "").error(409).contains("in use"), "{path}");
    }
    drop(writer);
    assert_eq!(bed.call("DELETE", &path, "").status, 204);
    bed.call("DELETE", &path, "").error(404);
    bed.call("DELETE", &path.replace("channels/0", "channels/x"), "")
        .error(400);
    assert_eq!(bed.call("DELETE", "/api/luns/fast/streams/radar", "").status, 204);
    bed.call("DELETE", "/api/luns/fast/streams/radar", "").error(404);
    assert_eq!(bed.call("DELETE", "/api/luns/fast", "").status, 204);
    assert!(bed.call("DELETE", "/api/luns/fast", "").error(404).contains("fast"));
}

#[test]
fn names_in_paths_are_decoded() {
    let bed = Bed::new();
    assert!(bed
        .call("DELETE", "/api/luns/a%20b%2fc", "")
        .error(404)
        .contains("a b/c"));
    bed.call("DELETE", "/api/luns/%ff", "").error(400);
}

#[test]
fn a_full_drive_is_insufficient_storage() {
    let full = store::Error::Io {
        what: "creating",
        path: "/mnt/a".into(),
        source: std::io::Error::from_raw_os_error(28),
    };
    assert_eq!(ApiError::from(full).status, 507);
    let full = store::Error::Full { lun: "fast".into() };
    assert_eq!(ApiError::from(full).status, 507);
    let broken = store::Error::Io {
        what: "creating",
        path: "/mnt/a".into(),
        source: std::io::Error::from_raw_os_error(5),
    };
    let error = ApiError::from(broken);
    assert_eq!(error.status, 500);
    assert!(error.message.contains("check the drive"));
}

#[test]
fn the_creation_of_a_lun_blocks_neither_events_nor_answers() {
    let bed = Bed::new();
    let (go, wait) = mpsc::channel::<()>();
    let (begun, has_begun) = mpsc::channel();
    std::thread::scope(|scope| {
        let (node, lun) = (&bed.node, bed.lun());
        let creation = scope.spawn(move || {
            node.create_lun_with("slow", &lun, || {
                begun.send(()).unwrap();
                wait.recv_timeout(BOUND).unwrap();
            })
        });
        has_begun.recv_timeout(BOUND).unwrap();
        let mut events = bed.events(("Authorization", &format!("Bearer {TOKEN}")));
        for _ in 0..2 {
            let state = events.next().unwrap();
            assert_eq!(state["creation"]["lun"], "slow");
            assert_eq!(state["creation"]["total"], 2 << 20);
        }
        assert!(bed
            .call("POST", "/api/luns", &bed.lun_json("other"))
            .error(409)
            .contains("slow is being created"));
        assert!(bed
            .call("DELETE", "/api/luns/any", "")
            .error(409)
            .contains("slow is being created"));
        go.send(()).unwrap();
        creation.join().unwrap().unwrap();
        let state = events.find(|state| state["creation"].is_null()).unwrap();
        assert_eq!(state["luns"][0]["name"], "slow");
    });
}

#[test]
fn a_session_is_stopped_once() {
    let bed = Bed::new();
    let running = bed.node.begin_session(session());
    assert_eq!(bed.call("POST", "/api/sessions/0/stop", "").status, 204);
    assert!(running.is_stopped());
    assert_eq!(
        bed.call("POST", "/api/sessions/0/stop", "").status,
        204,
        "stopping twice is no error"
    );
    drop(running);
    assert!(bed
        .call("POST", "/api/sessions/0/stop", "")
        .error(404)
        .contains("no session 0"));
    bed.call("POST", "/api/sessions/1/stop", "").error(404);
}

#[test]
fn events_have_the_state_and_its_changes() {
    let bed = Bed::new();
    let cookie = bed.cookie();
    let mut events = bed.events(("Cookie", &cookie));
    let first = events.next().unwrap();
    assert_eq!((&first["schema"], &first["name"]), (&1.into(), &"bed".into()));
    let second = events.next().unwrap();
    assert!(second["elapsed"].as_u64() > first["elapsed"].as_u64());
    let running = bed.node.begin_session(session());
    running.arrived();
    running.progress(5, Limit::Drive);
    let state = events.find(|state| state["sessions"][0]["limit"] == "drive").unwrap();
    assert_eq!(
        (&state["sessions"][0]["blocks"], &state["sessions"][0]["in_flight"]),
        (&1.into(), &5.into())
    );
    let error = std::io::Error::from_raw_os_error(5);
    bed.node
        .drive_failed(&running, bed.folder.path(), &error, "the recording ends");
    let state = events.find(|state| state["drives"][0]["error"].is_object()).unwrap();
    assert_eq!(state["drives"][0]["error"]["channel"], "fast/radar/0");
    assert!(state["sessions"][0]["warnings"][0]
        .as_str()
        .unwrap()
        .contains("Input/output error"));
    drop(running);
    let state = events.find(|state| state["sessions"][0]["running"] == false).unwrap();
    assert_eq!(state["sessions"][0]["dropped"], 1);
}

#[test]
fn an_event_stream_ends_with_its_login() {
    let bed = Bed::new();
    let cookie = bed.cookie();
    let other = bed.cookie();
    let mut events = bed.events(("Cookie", &cookie));
    let mut others = bed.events(("Cookie", &other));
    events.next().unwrap();
    others.next().unwrap();
    let origin = format!("http://{}", bed.server.address());
    bed.request("POST", "/logout", &[("Cookie", &cookie), ("Origin", &origin)], "");
    assert!(events.take(10).count() < 10, "a few may be sent before");
    assert!(others.next().is_some());
}

#[test]
fn event_streams_are_limited() {
    let bed = Bed::new();
    let bearer = format!("Bearer {TOKEN}");
    let header = ("Authorization", bearer.as_str());
    let mut streams: Vec<Events> = (0..MAX_STREAMS).map(|_| bed.events(header)).collect();
    for events in &mut streams {
        events.next().unwrap();
    }
    let reply = bed.request("GET", "/api/events", &[header], "");
    assert!(reply.error(503).contains("close other pages"));
    assert!(reply.header("retry-after").is_some());
    assert_eq!(bed.call("GET", "/api/status", "").status, 200);
}

#[test]
fn stopping_ends_event_streams_and_closes_the_port() {
    let bed = Bed::new();
    let mut events = bed.events(("Authorization", &format!("Bearer {TOKEN}")));
    events.next().unwrap();
    let idle = bed.connect();
    let address = bed.server.address();
    bed.server.stop();
    assert!(events.take(10).count() < 10);
    drop(idle);
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn clients_that_send_nothing_hinder_nobody() {
    let bed = Bed::new();
    let mut clients: Vec<TcpStream> = (0..100).map(|_| bed.connect()).collect();
    for client in &mut clients {
        client.write_all(b"GET /api/status HTTP/1.1\r\nHost: ").unwrap();
    }
    let mut body = bed.connect();
    let head = b"POST /api/luns HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{";
    body.write_all(head).unwrap();
    assert_eq!(bed.call("GET", "/api/status", "").status, 200);
}

#[test]
fn all_answers_have_the_headers_that_protect() {
    let bed = Bed::new();
    for path in [
        "/",
        "/login",
        "/assets/app.js",
        "/assets/common.js",
        "/assets/uplot.js",
        "/api/status",
        "/api/unknown",
        "/unknown",
    ] {
        for reply in [bed.call("GET", path, ""), bed.request("GET", path, &[], "")] {
            let policy = reply.header("content-security-policy").unwrap();
            for part in ["default-src 'self'", "frame-ancestors 'none'", "form-action 'self'"] {
                assert!(policy.contains(part), "{path}: {policy}");
            }
            assert!(!policy.contains("unsafe"));
            assert_eq!(reply.header("x-content-type-options"), Some("nosniff"), "{path}");
            assert_eq!(reply.header("cache-control"), Some("no-store"), "{path}");
            assert_eq!(reply.header("referrer-policy"), Some("no-referrer"), "{path}");
        }
    }
}

#[test]
fn the_chart_library_is_in_the_program_with_its_license() {
    let bed = Bed::new();
    assert!(bed.call("GET", "/assets/uplot.js", "").body.contains("uPlot"));
    assert!(bed.call("GET", "/assets/uplot.css", "").body.contains(".uplot"));
    assert!(bed.call("GET", "/assets/uplot.license.txt", "").body.contains("MIT"));
}

#[test]
fn a_short_token_is_refused() {
    let bed = Bed::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = serve(Arc::clone(&bed.node), listener, &WebOptions::new("123456789012345")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    assert!(error.to_string().contains("at least 16"));
}

#[test]
fn options_do_not_print_the_token() {
    let text = format!("{:?}", WebOptions::new(TOKEN));
    assert!(!text.contains(TOKEN), "{text}");
}

#[test]
fn a_stream_of_a_lun_is_created_by_its_options() {
    let bed = Bed::new();
    bed.node.create_lun("fast", &bed.lun()).unwrap();
    let stream = r#"{"name": "radar", "block_size": 4096, "channels": 1025}"#;
    assert!(bed
        .call("POST", "/api/luns/fast/streams", stream)
        .error(400)
        .contains("1024"));
    bed.node.create_stream("fast", "a", &StreamOptions::new(4096)).unwrap();
    let status: serde_json::Value = serde_json::from_str(&bed.call("GET", "/api/status", "").body).unwrap();
    assert_eq!(status["luns"][0]["streams"][0]["name"], "a");
    assert!(status["drives"][0]["free"].as_u64() > Some(0));
}

#[test]
fn the_error_of_a_drive_is_acknowledged_once() {
    let bed = Bed::new();
    let running = bed.node.begin_session(session());
    let id = running.id();
    let path = |drive: &str, session: u64| format!("/api/drives/{drive}/errors/{session}");
    let reason = bed.call("DELETE", &path("0", id), "").error(404);
    assert!(reason.contains("drive 0 has no error of session"), "{reason}");
    let error = std::io::Error::from_raw_os_error(5);
    bed.node
        .drive_failed(&running, bed.folder.path(), &error, "the recording ends");
    bed.call("DELETE", &path("1", id), "").error(404);
    bed.call("DELETE", &path("x", id), "").error(400);
    // A person who saw the error of another session does not know this one.
    bed.call("DELETE", &path("0", id + 1), "").error(404);
    assert_eq!(bed.call("DELETE", &path("0", id), "").status, 204);
    assert_eq!(bed.node.status().drives[0].error, None);
    bed.call("DELETE", &path("0", id), "").error(404);
}

/// Returns a machine with a switch, an accelerator, a NIC, and a drive.
fn machine(root: &std::path::Path) -> super::Machine {
    let port = "pci0000:00/0000:00:01.0";
    for (path, class) in [
        (port.to_owned(), "0x060400"),
        (format!("{port}/0000:03:00.0"), "0x120000"),
        (format!("{port}/0000:04:00.0"), "0x020000"),
        (format!("{port}/0000:05:00.0"), "0x010802"),
    ] {
        let files = [("vendor", "0x1de5"), ("device", "0x0001"), ("class", class)];
        p2pmem::fake::write_pci_function(&root.join("sys"), &path, &files).unwrap();
    }
    let fake = p2pmem::fake::Fake::new().provider("0000:03:00.0".parse().unwrap(), 1 << 20);
    super::Machine::new(root, move || Ok(fake.device()))
}

#[test]
fn the_topology_shows_the_paths_of_running_sessions() {
    let root = tempfile::tempdir().unwrap();
    let bed = Bed::with(&WebOptions::new(TOKEN).machine(machine(root.path())));
    let topology = || -> serde_json::Value {
        let reply = bed.call("GET", "/api/topology", "");
        assert_eq!(
            (reply.status, reply.header("content-type")),
            (200, Some("application/json"))
        );
        serde_json::from_str(&reply.body).unwrap()
    };
    let all = topology();
    assert_eq!(all["sessions"], serde_json::json!([]));
    assert_eq!(all["tree"][0]["role"], "host-bridge");
    assert!(!all["svg"].as_str().unwrap().contains("chosen"));

    let mut options = session();
    options.devices = crate::status::SessionDevices {
        nic: Some("0000:04:00.0".parse().unwrap()),
        memory: Some("0000:03:00.0".parse().unwrap()),
        drives: vec!["0000:05:00.0".parse().unwrap()],
    };
    let ended = bed.node.begin_session(options.clone());
    drop(ended);
    let running = bed.node.begin_session(options.clone());
    options.direction = Direction::Play;
    let playing = bed.node.begin_session(options);
    // Host memory is in no drawing.
    let host = bed.node.begin_session(session());
    let all = topology();
    let about = |number: usize| all["sessions"][number]["about"].as_str().unwrap();
    assert_eq!(
        about(0),
        "Session 1, record fast/radar/0: mlx5_0 → memory of 0000:03:00.0 → 0000:05:00.0"
    );
    assert_eq!(
        about(1),
        "Session 2, play fast/radar/0: 0000:05:00.0 → memory of 0000:03:00.0 → mlx5_0"
    );
    assert_eq!(
        about(2),
        "Session 3, record fast/radar/0: mlx5_0 → host memory → the drives of LUN fast"
    );
    assert_eq!(all["sessions"][2]["drawn"], false);
    assert!(all["svg"].as_str().unwrap().contains("chosen for session 1, session 2"));
    let accelerator = &all["tree"][0]["children"][0]["children"][0];
    assert_eq!(accelerator["chosen_for"], serde_json::json!(["session 1", "session 2"]));
    drop((running, playing, host));
    assert_eq!(topology()["sessions"], serde_json::json!([]));
}

#[test]
fn a_machine_without_providers_or_a_pci_bus_has_a_reason() {
    let root = tempfile::tempdir().unwrap();
    drop(machine(root.path()));
    let closed = super::Machine::new(root.path(), || p2pmem::Device::open_path("/nonexistent/p2pmem"));
    let bed = Bed::with(&WebOptions::new(TOKEN).machine(closed));
    let reply = bed.call("GET", "/api/topology", "");
    assert!(reply.body.contains("The providers are unknown: "), "{reply:?}");
    let none = super::Machine::new("/nonexistent", || p2pmem::Device::open_path("/nonexistent/p2pmem"));
    let bed = Bed::with(&WebOptions::new(TOKEN).machine(none));
    let reason = bed.call("GET", "/api/topology", "").error(500);
    assert!(reason.starts_with("cannot read the topology: "), "{reason}");
}

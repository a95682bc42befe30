// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the control protocol with peers that send invalid data, send nothing, or disconnect.

use std::net::{TcpListener, TcpStream};
use std::thread;

use p2pmem_ucx_sys::MAX_PACKED;
use p2pmem_verbs::Link;
use proptest::prelude::*;

use super::*;

const LIMIT: Duration = Duration::from_secs(10);

/// Returns a control connection and the plain socket at its other end.
fn pair(limit: Duration) -> (Control, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (stream, _) = listener.accept().unwrap();
    (Control::new(stream, limit).unwrap(), other)
}

fn test() -> Test {
    Test {
        mode: Mode::Write,
        sizes: vec![2 << 20],
        iterations: 2000,
        volume: None,
        depth: 16,
        batch: None,
        budget: 32 << 20,
        handshake: true,
        staged: false,
        verify: true,
        window: None,
        space: 1 << 30,
        seed: 1,
        nics: 1,
        peer: None,
        peer_waits: None,
    }
}

fn endpoint() -> Endpoint {
    Endpoint {
        nic: "mlx5_0".into(),
        address: Address {
            link: Link::Infiniband,
            lid: 1,
            gid: [0; 16],
            qpn: 0x123,
            psn: 0x456,
            mtu: 4096,
            reads: 16,
        },
        payload: Window {
            address: 1 << 40,
            rkey: 7,
            bytes: 4096,
        },
        handled: Window {
            address: 0,
            rkey: 8,
            bytes: 8,
        },
        ucx: None,
    }
}

/// Returns the error after the peer sent `bytes` and closed the connection.
fn error_of(bytes: &[u8]) -> String {
    let (mut line, mut other) = pair(LIMIT);
    let bytes = bytes.to_vec();
    let writer = thread::spawn(move || {
        // The receiver may close the connection before it has read all bytes.
        let _ = other.write_all(&bytes);
    });
    let error = format!("{:#}", line.receive::<FromServer>().unwrap_err());
    drop(line);
    writer.join().unwrap();
    error
}

#[test]
fn messages_arrive_in_any_fragmentation() {
    let (mut line, mut other) = pair(LIMIT);
    let hello = FromClient::Hello {
        version: VERSION,
        test: test(),
    };
    let connect = FromClient::Connect(vec![endpoint()]);
    let mut bytes = serde_json::to_vec(&hello).unwrap();
    bytes.push(b'\n');
    bytes.extend(serde_json::to_vec(&connect).unwrap());
    bytes.push(b'\n');
    let writer = thread::spawn(move || {
        for chunk in bytes.chunks(7) {
            other.write_all(chunk).unwrap();
        }
        other
    });
    assert_eq!(line.receive::<FromClient>().unwrap(), hello);
    assert_eq!(line.receive::<FromClient>().unwrap(), connect);
    drop(writer.join().unwrap());
    let error = line.receive::<FromClient>().unwrap_err().to_string();
    assert!(error.contains("ended the connection"), "{error}");
}

#[test]
fn a_peer_on_this_machine_is_recognized() {
    let (line, other) = pair(LIMIT);
    assert!(line.is_local());
    // Another address of the loopback network stands for another machine.
    let listener = TcpListener::bind("127.0.0.2:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert_eq!(stream.local_addr().unwrap().ip(), other.local_addr().unwrap().ip());
    assert!(!Control::new(stream, LIMIT).unwrap().is_local());
}

#[test]
fn a_connection_closed_with_unread_data_has_ended() {
    let (mut line, other) = pair(LIMIT);
    line.send(&FromClient::Connect(vec![endpoint()])).unwrap();
    drop(other);
    let error = line.receive::<FromServer>().unwrap_err().to_string();
    assert!(error.contains("ended the connection"), "{error}");
}

#[test]
fn invalid_messages_are_rejected() {
    for message in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"\n",
        b"{}\n",
        b"\xff\xfe\n",
        b"{\"started\":1}\n",
        b"{\"nothing\":null}\n",
        b"{\"finished\":[{\"checked\":null,\"copied\":-1}]}\n",
        b"{\"finished\":[{\"checked\":null,\"copied\":0,\"more\":0}]}\n",
        b"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\n",
    ] {
        let error = error_of(message);
        assert!(error.contains("invalid message"), "{message:?}: {error}");
    }
    let error = error_of(&vec![b'['; MAX_LINE + 5000]);
    assert!(error.contains("a line of more than"), "{error}");
}

#[test]
fn names_of_the_other_side_are_short_and_without_control_characters() {
    let good = serde_json::to_value(endpoint()).unwrap();
    let side = serde_json::json!({
        "nics": ["mlx5_0"], "memory": "cmb", "providers": ["0000:03:00.0"], "registration": "dma-buf"
    });
    let peer = serde_json::json!({ "kind": "cmb", "device": "0000:03:00.0" });
    serde_json::from_value::<Endpoint>(good.clone()).unwrap();
    serde_json::from_value::<Side>(side.clone()).unwrap();
    serde_json::from_value::<PeerMemory>(peer).unwrap();
    let none = serde_json::json!({ "kind": "cmb" });
    assert_eq!(serde_json::from_value::<PeerMemory>(none).unwrap().device, None);
    for bad in ["\u{1b}[2J", "a\n", "\u{202e}", &"x".repeat(MAX_NAME + 1)] {
        let mut endpoint = good.clone();
        endpoint["nic"] = bad.into();
        assert!(serde_json::from_value::<Endpoint>(endpoint).is_err(), "{bad:?}");
        let peer = serde_json::json!({ "kind": "cmb", "device": bad });
        assert!(serde_json::from_value::<PeerMemory>(peer).is_err(), "{bad:?}");
        for field in ["memory", "registration"] {
            let mut side = side.clone();
            side[field] = bad.into();
            assert!(serde_json::from_value::<Side>(side).is_err(), "{field} {bad:?}");
        }
        for field in ["nics", "providers"] {
            let mut side = side.clone();
            side[field] = serde_json::json!(["a", bad]);
            let error = serde_json::from_value::<Side>(side).unwrap_err().to_string();
            assert!(error.contains("a name has") && !error.contains(bad), "{error:?}");
        }
    }
    let mut many = side;
    many["nics"] = vec!["a"; MAX_NICS + 1].into();
    assert!(serde_json::from_value::<Side>(many).is_err());
}

#[test]
fn the_other_sides_reason_is_passed_on_without_control_characters() {
    let error = error_of(b"{\"failed\":\"no \\u001b[31m memory\\n\"}\n");
    assert_eq!(error, "the other side failed: no [31m memory");
}

#[test]
fn a_wait_ends_at_the_limit() {
    let (mut line, mut other) = pair(Duration::from_millis(50));
    let error = line.receive::<FromServer>().unwrap_err().to_string();
    assert!(error.contains("no message") && error.contains("--timeout"), "{error}");
    // An incomplete message counts as no message, and its bytes are kept.
    other.write_all(b"\"rea").unwrap();
    let none: Option<FromServer> = line.receive_within(Duration::from_millis(20)).unwrap();
    assert_eq!(none, None);
    other.write_all(b"dy\"\n").unwrap();
    assert_eq!(line.receive::<FromServer>().unwrap(), FromServer::Ready);
}

#[test]
fn invalid_parameters_are_rejected() {
    assert_eq!(test().check(), Ok(()));
    type Change = fn(&mut Test);
    let change: [(&str, Change); 13] = [
        ("sizes", |t| t.sizes.clear()),
        ("sizes", |t| t.sizes = vec![4096; 65]),
        ("multiple", |t| t.sizes.push(u64::MAX)),
        ("multiple", |t| t.sizes.push(0)),
        ("10000000", |t| t.iterations = 0),
        ("10000000", |t| t.iterations = u64::MAX),
        ("volume", |t| t.volume = Some(0)),
        ("depth", |t| t.depth = 0),
        ("depth", |t| t.depth = u32::MAX),
        ("handshake", |t| t.mode = Mode::Read),
        ("NICs", |t| t.nics = usize::MAX),
        ("window", |t| t.window = Some(0)),
        ("window", |t| t.window = Some(u64::MAX)),
    ];
    for (word, change) in change {
        let mut test = test();
        change(&mut test);
        let why = test.check().unwrap_err();
        assert!(why.contains(word), "{word}: {why}");
    }
    let staged = Test {
        mode: Mode::Send,
        handshake: false,
        staged: true,
        ..test()
    };
    assert!(staged.check().unwrap_err().contains("staged"));
    type Option = fn(&mut Test);
    let change: [(&str, Option); 3] = [
        ("handshake", |t| t.handshake = true),
        ("staged", |t| t.staged = true),
        ("--batch", |t| t.batch = Some(2)),
    ];
    for (word, change) in change {
        let mut test = Test {
            mode: Mode::Ucx,
            handshake: false,
            ..test()
        };
        assert_eq!(test.check(), Ok(()));
        change(&mut test);
        let why = test.check().unwrap_err();
        assert!(why.contains(word) && why.contains("--mode write"), "{why}");
    }
}

#[test]
fn an_unknown_kind_of_memory_is_rejected() {
    let with = |kind: &str| Test {
        peer: Some(PeerMemory {
            kind: kind.into(),
            device: None,
        }),
        ..test()
    };
    for kind in MemoryKind::value_variants() {
        assert_eq!(with(kind.name()).check(), Ok(()));
        assert_eq!(with(kind.name()).peer.unwrap().kind(), Ok(*kind));
    }
    let why = with("tape").check().unwrap_err();
    assert!(
        why.contains("\"tape\"") && why.contains("cpu, accelerator, cmb, fpga, pageless"),
        "{why}"
    );
}

#[test]
fn other_versions_are_named_even_if_their_fields_are_unknown() {
    let newer = br#"{"hello":{"version":7,"test":{"mode":"write","future":1}}}"#;
    let error = format!("{:#}", parse::<FromClient>(newer).unwrap_err());
    assert_eq!(
        error,
        format!("the other side has protocol version 7, this side {VERSION}: use the same p2pmem-perf on both sides")
    );
    let error = format!(
        "{:#}",
        parse::<FromServer>(br#"{"welcome":{"version":3}}"#).unwrap_err()
    );
    assert!(error.contains("protocol version 3"), "{error}");
    // The same version with unknown fields is no valid message.
    let same = format!(r#"{{"hello":{{"version":{VERSION},"future":1}}}}"#);
    let error = format!("{:#}", parse::<FromClient>(same.as_bytes()).unwrap_err());
    assert!(error.contains("invalid message"), "{error}");
    // A client of version 3 sends no field that this version does not know; the server compares the versions.
    let mut older = serde_json::to_value(FromClient::Hello {
        version: 3,
        test: test(),
    })
    .unwrap();
    older["hello"]["test"].as_object_mut().unwrap().remove("peer");
    let older = serde_json::to_vec(&older).unwrap();
    assert!(matches!(parse(&older).unwrap(), FromClient::Hello { version: 3, .. }));
}

#[test]
fn the_peer_learns_what_to_do() {
    let missing = p2pmem::Device::open_path("/nonexistent/p2pmem").unwrap_err();
    let remedy = missing.remedy().unwrap();
    let error = anyhow::Error::new(missing).context("allocating");
    let text = reason_and_remedy(&error);
    assert!(
        text.starts_with("allocating: cannot open") && text.ends_with(&format!("(remedy: {remedy})")),
        "{text}"
    );
    assert_eq!(reason_and_remedy(&anyhow::anyhow!("no memory")), "no memory");
}

#[test]
fn a_volume_limits_the_messages_of_large_sizes() {
    let test = Test {
        volume: Some(1 << 30),
        ..test()
    };
    assert_eq!(test.messages(4096), 2000);
    assert_eq!(test.messages(64 << 20), 16);
    assert_eq!(
        Test {
            volume: Some(1),
            ..test
        }
        .messages(64 << 20),
        1
    );
}

#[test]
fn messages_above_the_memory_are_cut_into_chunks_and_acknowledged() {
    let test = Test {
        handshake: false,
        space: 256 << 20,
        ..test()
    };
    let large = 1 << 30;
    assert_eq!((test.chunks(2 << 20), test.chunks(large)), (1, 16));
    assert!(!test.has_handshake(2 << 20) && test.has_handshake(large));
    assert_eq!((test.slots(large).size, test.slots(large).source), (64 << 20, 2));
    assert_eq!((test.in_flight(2 << 20), test.in_flight(large)), (16, 2));
    assert_eq!(test.part(2 << 20, 17), "message 17 of 2000");
    assert_eq!(test.part(large, 17), "chunk 1 of 16 of message 1 of 2000");
    for (mode, acknowledged) in [
        (Mode::WriteImmediate, true),
        (Mode::Read, false),
        (Mode::Send, false),
        (Mode::Tcp, false),
        (Mode::Ucx, false),
    ] {
        assert_eq!(Test { mode, ..test.clone() }.has_handshake(large), acknowledged);
    }
    assert_eq!(test.wanted_bytes(), 17 * (2 << 20) + 8192);
    // The slots fit the memory even if the budget is larger.
    let small = Test {
        space: 8 << 20,
        ..test.clone()
    };
    assert!(small.slots(2 << 20).fits(8 << 20));
    assert_eq!(small.check_space(), Ok(()));
    let none = Test { space: 0, ..test };
    assert!(none.check_space().unwrap_err().contains("p2pmemctl list"));
    // Nothing panics for parameters of an untrusted peer.
    assert_eq!(none.chunks(large), 1);
}

#[test]
fn calls_and_batches_do_not_move_through_a_window() {
    let call = Test {
        mode: Mode::Rpc,
        handshake: false,
        sizes: vec![64 << 10],
        ..test()
    };
    let batch = Test {
        mode: Mode::Write,
        batch: Some(4),
        ..call.clone()
    };
    let read = Test {
        mode: Mode::Read,
        ..batch.clone()
    };
    let put = Test {
        mode: Mode::Ucx,
        ..call.clone()
    };
    // The memory is not known yet in the client's first check; three slots fit `enough`, but not `less`.
    let (enough, less) = (3 * (64 << 10) + GUARD + WORDS, 3 * (64 << 10) + GUARD + WORDS - 4096);
    for (test, word) in [
        (&call, "a call has one chunk"),
        (&put, "a put of UCX has one chunk"),
        (&batch, "--batch"),
    ] {
        let with = |space| Test { space, ..test.clone() };
        assert_eq!(with(0).check(), Ok(()));
        assert_eq!(with(enough).check_space(), Ok(()));
        let why = with(less).check_space().unwrap_err();
        assert!(why.contains(word) && why.contains("--size"), "{why}");
    }
    // Reads through a window have no handshake.
    let windowed = Test { space: less, ..read };
    assert!(windowed.has_window(64 << 10));
    assert_eq!(windowed.check_space(), Ok(()));
    let staged = Test { staged: true, ..batch };
    assert!(staged.check().unwrap_err().contains("--batch"));
}

#[test]
fn endpoints_are_checked() {
    check_endpoints(&[endpoint()], 1).unwrap();
    assert!(check_endpoints(&[endpoint()], 2).is_err());
    let change: [fn(&mut Endpoint); 5] = [
        |e| e.address.qpn = 1 << 24,
        |e| e.address.psn = u32::MAX,
        |e| e.address.mtu = 1500,
        |e| e.address.reads = 0,
        |e| e.nic = "x".repeat(65),
    ];
    for change in change {
        let mut bad = endpoint();
        change(&mut bad);
        assert!(check_endpoints(&[bad], 1).is_err());
    }
}

#[test]
fn addresses_beyond_a_window_are_rejected() {
    let window = endpoint().payload;
    assert_eq!(window.at(0, 4096).unwrap(), 1 << 40);
    assert_eq!(window.at(4095, 1).unwrap(), (1 << 40) + 4095);
    for (at, bytes) in [(0, 4097), (4096, 1), (u64::MAX, 1), (1, u64::MAX)] {
        assert!(window.at(at, bytes).is_err(), "{at} {bytes}");
    }
    let high = Window {
        address: u64::MAX,
        ..window
    };
    assert!(high.at(1, 1).is_err());
}

#[test]
fn addresses_and_keys_of_ucx_have_a_limit() {
    let port = UcxPort {
        worker: vec![1; MAX_PACKED],
        key: vec![0xab, 0],
        address: 1 << 40,
        bytes: 4096,
    };
    let all = Endpoint {
        ucx: Some(port.clone()),
        ..endpoint()
    };
    let good = serde_json::to_value(&all).unwrap();
    assert_eq!(good["ucx"]["key"], "ab00");
    assert_eq!(serde_json::from_value::<Endpoint>(good.clone()).unwrap(), all);
    // The endpoints of the largest number of NICs fit a line.
    assert!(serde_json::to_vec(&vec![all; MAX_NICS]).unwrap().len() < MAX_LINE);
    for bad in ["abc", "zz", &"00".repeat(MAX_PACKED + 1)] {
        for field in ["worker", "key"] {
            let mut endpoint = good.clone();
            endpoint["ucx"][field] = bad.into();
            assert!(serde_json::from_value::<Endpoint>(endpoint).is_err(), "{field} {bad}");
        }
    }
    assert_eq!(port.at(4000, 96).unwrap(), (1 << 40) + 4000);
    assert!(port.at(4000, 97).is_err());
}

#[test]
fn long_reasons_are_truncated_between_characters() {
    let long = anyhow::anyhow!("{}", "é".repeat(MAX_REASON));
    let short = reason(&long);
    assert!(short.len() <= MAX_REASON && short.chars().all(|c| c == 'é'));
}

proptest! {
    #[test]
    fn arbitrary_bytes_cause_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse::<FromClient>(&bytes);
        let _ = parse::<FromServer>(&bytes);
    }

    #[test]
    fn damaged_message_is_rejected_or_checked(at in 0usize..400, byte in any::<u8>()) {
        let hello = FromClient::Hello { version: VERSION, test: test() };
        let mut bytes = serde_json::to_vec(&hello).unwrap();
        let at = at % bytes.len();
        bytes[at] = byte;
        if let Ok(FromClient::Hello { test, .. }) = parse(&bytes) {
            // A damaged message that parses is still checked before use.
            let _ = test.check();
        }
    }
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the control connection.

use std::net::TcpListener;
use std::thread;

use super::*;

const LIMIT: Duration = Duration::from_secs(60);

fn pair(limit: Duration) -> (Connection, Connection) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    (
        Connection::new(near, limit).unwrap(),
        Connection::new(far, limit).unwrap(),
    )
}

fn token(text: &str) -> Token {
    Token::new(text).unwrap()
}

#[test]
fn both_sides_log_in() {
    let (mut program, mut node) = pair(LIMIT);
    let serving = thread::spawn(move || node.welcome(&token("0123456789abcdef"), "storage"));
    let name = program.log_in(&token("0123456789abcdef"), "gpu\x1b[31m1").unwrap();
    assert_eq!(name, "storage");
    assert_eq!(serving.join().unwrap().unwrap(), "gpu[31m1");
}

#[test]
fn wrong_token_is_refused() {
    let (mut program, mut node) = pair(LIMIT);
    let serving = thread::spawn(move || {
        let error = node.welcome(&token("0123456789abcdef"), "storage").unwrap_err();
        let reason = error.to_string();
        node.send(&Reply::Failed { reason }).unwrap();
        error
    });
    let error = program.log_in(&token("fedcba9876543210"), "gpu").unwrap_err();
    assert!(
        matches!(&error, Error::Failed(reason) if reason.contains("token is wrong")),
        "{error}"
    );
    assert!(matches!(serving.join().unwrap(), Error::Token));
}

#[test]
fn other_versions_are_refused_by_both_sides() {
    let (mut program, mut node) = pair(LIMIT);
    let (version, nonce) = (VERSION + 1, String::new());
    node.send(&Reply::Challenge { version, nonce }).unwrap();
    let error = program.log_in(&token("0123456789abcdef"), "gpu").unwrap_err();
    assert!(matches!(error, Error::Version(found) if found == version), "{error}");
    let (mut program, mut node) = pair(LIMIT);
    let hello = Request::Hello {
        version,
        nonce: String::new(),
        proof: String::new(),
        name: String::new(),
    };
    program.send(&hello).unwrap();
    let error = node.welcome(&token("0123456789abcdef"), "storage").unwrap_err();
    assert!(matches!(error, Error::Version(found) if found == version), "{error}");
}

#[test]
fn message_of_a_gigabyte_is_refused_before_it_is_read() {
    let (mut near, mut far) = pair(LIMIT);
    near.stream.write_all(&(1_u32 << 30).to_be_bytes()).unwrap();
    let error = far.receive::<Request>().unwrap_err();
    assert!(matches!(error, Error::TooLong(bytes) if bytes == 1 << 30), "{error}");
    let long = Reply::Failed {
        reason: "x".repeat(MAX_MESSAGE),
    };
    assert!(matches!(near.send(&long), Err(Error::TooLong(_))));
}

#[test]
fn garbage_and_unknown_messages_are_refused() {
    for body in [
        "",
        "{",
        "null",
        "\"List\"",
        "{\"record\": 7}",
        "{\"hello\": {\"version\": 1}}",
        "\u{0}",
    ] {
        let (mut near, mut far) = pair(LIMIT);
        near.stream.write_all(&(body.len() as u32).to_be_bytes()).unwrap();
        near.stream.write_all(body.as_bytes()).unwrap();
        let error = far.receive::<Request>().unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{body}: {error}");
    }
}

#[test]
fn message_in_pieces_is_received_and_several_at_once() {
    let (mut near, mut far) = pair(LIMIT);
    assert_eq!(far.try_receive::<Request>().unwrap(), None);
    let body = serde_json::to_vec(&Request::List).unwrap();
    let mut bytes = (body.len() as u32).to_be_bytes().to_vec();
    bytes.extend(body);
    let mut twice = bytes.clone();
    twice.extend(&bytes);
    let sender = thread::spawn(move || {
        for byte in twice {
            near.stream.write_all(&[byte]).unwrap();
        }
        near
    });
    assert_eq!(far.receive::<Request>().unwrap(), Request::List);
    assert_eq!(far.receive::<Request>().unwrap(), Request::List);
    drop(sender.join().unwrap());
    assert!(matches!(far.try_receive::<Request>(), Err(Error::Closed)));
}

#[test]
fn silence_and_an_end_in_the_middle_are_errors() {
    let (_near, mut far) = pair(Duration::from_millis(1));
    assert!(matches!(far.receive::<Request>(), Err(Error::Timeout(_))));
    let (mut near, mut far) = pair(LIMIT);
    near.stream.write_all(&[0, 0, 0]).unwrap();
    drop(near);
    assert!(matches!(far.receive::<Request>(), Err(Error::Closed)));
}

#[test]
fn node_without_the_token_is_refused() {
    let (mut program, mut node) = pair(LIMIT);
    let impostor = thread::spawn(move || {
        node.send(&Reply::Challenge {
            version: VERSION,
            nonce: "00".into(),
        })
        .unwrap();
        let Request::Hello { proof, .. } = node.receive::<Request>().unwrap() else {
            panic!("no hello");
        };
        // The only proof that it has is the program's.
        let name = "storage".into();
        node.send(&Reply::Welcome { name, proof }).unwrap();
        node
    });
    let error = program.log_in(&token("0123456789abcdef"), "gpu").unwrap_err();
    assert!(matches!(error, Error::Token), "{error}");
    drop(impostor.join().unwrap());
}

#[test]
fn reasons_are_sent_once_without_control_characters() {
    let (mut near, mut far) = pair(LIMIT);
    near.fail("red \u{1b}[31m");
    near.fail("again");
    drop(near);
    let error = far.receive_reply().unwrap_err();
    assert!(
        matches!(&error, Error::Failed(reason) if reason == "red [31m"),
        "{error}"
    );
    assert!(matches!(far.receive_reply(), Err(Error::Closed)));
    let (mut near, mut far) = pair(LIMIT);
    near.send(&"\u{1b}[31m".to_owned()).unwrap();
    let error = far.receive::<Request>().unwrap_err().to_string();
    assert!(
        error.contains("unknown variant") && !error.contains('\u{1b}'),
        "{error:?}"
    );
}

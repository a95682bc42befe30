// SPDX-License-Identifier: MIT OR Apache-2.0

//! A client of HTTP for tests, by real connections. The tests of several crates include this file.

// Each crate uses a part of it.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

pub const JSON: (&str, &str) = ("Content-Type", "application/json");
/// The longest wait for an answer. Answers that do not come at once are failures.
pub const BOUND: Duration = Duration::from_secs(60);
/// How long a test reads an event stream, also on a loaded machine.
const STREAM_BOUND: Duration = Duration::from_secs(300);

/// A client of a server.
pub struct HttpClient {
    pub address: SocketAddr,
    pub token: &'static str,
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    head: String,
    pub body: String,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        let find = |line: &&str| {
            line.split_once(": ")
                .is_some_and(|(key, _)| key.eq_ignore_ascii_case(name))
        };
        self.head
            .lines()
            .find(find)
            .and_then(|line| line.split_once(": "))
            .map(|(_, value)| value)
    }

    /// Checks the status and that the body is JSON with a reason, and returns the reason.
    pub fn error(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/json"));
        let body: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        body["error"].as_str().unwrap().to_owned()
    }

    /// Returns the body as JSON.
    pub fn json(&self) -> serde_json::Value {
        assert!((200..300).contains(&self.status), "{self:?}");
        serde_json::from_str(&self.body).unwrap()
    }
}

impl HttpClient {
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        stream
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
        let mut stream = self.connect();
        let mut text = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n",
            self.address
        );
        for (name, value) in headers {
            text += &format!("{name}: {value}\r\n");
        }
        text += &format!("Content-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(text.as_bytes()).unwrap();
        stream
    }

    pub fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Reply {
        let mut text = String::new();
        self.send(method, path, headers, body)
            .read_to_string(&mut text)
            .unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        Reply {
            status: head[9..12].parse().unwrap(),
            head: head.to_owned(),
            body: body.to_owned(),
        }
    }

    /// Sends a request of a program with the token.
    pub fn call(&self, method: &str, path: &str, body: &str) -> Reply {
        let bearer = self.bearer();
        self.request(method, path, &[("Authorization", &bearer), JSON], body)
    }

    pub fn bearer(&self) -> String {
        format!("Bearer {}", self.token)
    }

    pub fn log_in(&self, token: &str) -> Reply {
        let form = ("Content-Type", "application/x-www-form-urlencoded");
        self.request("POST", "/login", &[form], &format!("token={}", token.replace(' ', "+")))
    }

    /// Logs in, and returns the cookie.
    pub fn cookie(&self) -> String {
        let reply = self.log_in(self.token);
        let cookie = reply.header("set-cookie").unwrap();
        cookie.split(';').next().unwrap().to_owned()
    }

    pub fn events(&self, header: (&str, &str)) -> Events {
        let stream = self.send("GET", "/api/events", &[header], "");
        Events(BufReader::new(stream).lines(), Instant::now())
    }
}

/// An open event stream, and when it was opened.
pub struct Events(std::io::Lines<BufReader<TcpStream>>, Instant);

impl Iterator for Events {
    type Item = serde_json::Value;

    /// Returns the next state, or `None` at the end of the stream.
    fn next(&mut self) -> Option<serde_json::Value> {
        loop {
            // The server sends a state each second, so a read does not time out.
            assert!(
                self.1.elapsed() < STREAM_BOUND,
                "the awaited state did not come within {STREAM_BOUND:?}"
            );
            let line = self.0.next()?.unwrap();
            if let Some(json) = line.strip_prefix("data: ") {
                return Some(serde_json::from_str(json).unwrap());
            }
        }
    }
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! The threads that read a guest's console and the port of its init, and the events that they send.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread;

use p2pmem_guest::wire::{self, Frame};

use crate::dmesg;

/// The number of console lines that are kept.
const CONSOLE_LINES: usize = 2000;

/// The input of the thread that uses a guest.
pub(super) enum Event {
    Frame(Frame),
    /// A request to end a command, with the reason.
    Stop(u64, Why),
    PortEnded(String),
    Panic(String),
    ConsoleEnded,
}

/// The reason why a command is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// The command is no longer needed.
    Needless,
    /// The command exceeded its time limit.
    Late,
}

/// The last lines of the console.
#[derive(Debug, Default)]
pub(super) struct Console {
    pub(super) lines: VecDeque<String>,
    /// The number of lines since the boot.
    pub(super) count: usize,
}

/// Ends a command of a guest, from a thread other than the one that waits for the command.
#[derive(Clone)]
pub struct Stopper {
    pub(super) id: u64,
    pub(super) send: Sender<Event>,
}

impl Stopper {
    /// Ends the command, if it still runs, because it is no longer needed.
    pub fn stop(&self) {
        self.send(Why::Needless);
    }

    /// Ends the command, if it still runs, because its time limit is over.
    pub fn time_out(&self) {
        self.send(Why::Late);
    }

    fn send(&self, why: Why) {
        // An error means that the guest has ended, and with it the command.
        let _ = self.send.send(Event::Stop(self.id, why));
    }
}

/// Starts the thread that reads the console.
pub(super) fn read_console(
    from: impl std::io::Read + Send + 'static,
    console: Arc<Mutex<Console>>,
    send: Sender<Event>,
) {
    thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        while from.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            let panic = dmesg::is_panic(&text).then(|| text.clone());
            if let Ok(mut console) = console.lock() {
                console.lines.push_back(text);
                console.count += 1;
                if console.lines.len() > CONSOLE_LINES {
                    console.lines.pop_front();
                }
            }
            if let Some(line) = panic {
                let _ = send.send(Event::Panic(line));
            }
        }
        let _ = send.send(Event::ConsoleEnded);
    });
}

/// Starts the thread that reads the port of the guest's init.
pub(super) fn read_port(port: UnixStream, send: Sender<Event>) {
    thread::spawn(move || {
        let mut from = BufReader::new(port);
        let why = loop {
            match wire::read_frame(&mut from) {
                Ok(Some(frame)) => {
                    if send.send(Event::Frame(frame)).is_err() {
                        return;
                    }
                }
                Ok(None) => break "its port was closed".to_owned(),
                Err(e) => break format!("its port: {e}"),
            }
        };
        let _ = send.send(Event::PortEnded(why));
    });
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! Commands in a guest: running, following and ending them.

use std::time::{Duration, Instant};

use anyhow::Result;
use p2pmem_guest::limits::Overrun;
use p2pmem_guest::wire::{self, KMSG_MARK, Kind, ToGuest, ToHost};

use super::input::{Stopper, Why};
use super::{End, Vm};
use crate::command::{Command, Outcome, Status, Stream};
use crate::dmesg;

/// The time limit for a command that exceeded its own limit to end after it was killed.
const KILL_LIMIT: Duration = Duration::from_secs(60);

impl Vm {
    /// Runs a command, and passes its output to `live` as it arrives.
    ///
    /// # Errors
    ///
    /// The runner's own channels are broken. A guest that panics or ends is an outcome, not an error.
    pub fn exec(&mut self, command: &Command, live: &mut dyn FnMut(Stream, &[u8])) -> Result<Outcome> {
        self.exec_server(command, live, &mut || {})
    }

    /// Returns an object that can end the next command.
    pub fn stopper(&self) -> Stopper {
        Stopper {
            id: self.next_command,
            send: self.send.clone(),
        }
    }

    /// As [`Vm::exec`]; calls `listening` when the command listens on its port.
    ///
    /// # Errors
    ///
    /// Those of [`Vm::exec`].
    pub fn exec_server(
        &mut self,
        command: &Command,
        live: &mut dyn FnMut(Stream, &[u8]),
        listening: &mut dyn FnMut(),
    ) -> Result<Outcome> {
        let start = Instant::now();
        let id = self.next_command;
        self.next_command += 1;
        let mut outcome = Outcome {
            status: Status::TimedOut,
            stdout: Vec::new(),
            stderr: Vec::new(),
            dmesg: Vec::new(),
            findings: Vec::new(),
            seconds: 0.0,
        };
        let exec = ToGuest::Exec {
            id,
            argv: command.argv.clone(),
            env: command.env.clone(),
            cwd: command.cwd.clone(),
            listen: command.listen,
        };
        // If the port is broken, its stream ends below.
        let _ = wire::write_control(&mut self.port, &exec);
        let ended = self.follow(
            id,
            start + command.limit * self.kernel.time_factor,
            &mut outcome,
            live,
            listening,
        );
        outcome.status = match ended {
            Ok(status) => status,
            Err(end @ (End::TimedOut | End::Stopped(_))) => {
                let (kill, status) = match end {
                    End::Stopped(Why::Needless) => (ToGuest::Stop { id }, Status::Stopped),
                    _ => (ToGuest::TimedOut { id }, Status::TimedOut),
                };
                let _ = wire::write_control(&mut self.port, &kill);
                self.ending = true;
                let ended = self.follow(
                    id,
                    Instant::now() + KILL_LIMIT * self.kernel.time_factor,
                    &mut outcome,
                    live,
                    listening,
                );
                self.ending = false;
                match ended {
                    Err(End::Panicked(line)) => Status::Panicked { line },
                    Ok(_) => status,
                    Err(_) => {
                        self.ended(End::Died("it did not answer after a command was killed".into()));
                        status
                    }
                }
            }
            Err(End::Panicked(line)) => Status::Panicked { line },
            Err(End::Died(why)) => Status::Died { why },
        };
        outcome.dmesg = self.take_log();
        outcome.findings = dmesg::findings(&outcome.dmesg);
        outcome.seconds = start.elapsed().as_secs_f64();
        Ok(outcome)
    }

    /// Waits for the end of a command, and for the mark in the kernel log that belongs to it.
    fn follow(
        &mut self,
        id: u64,
        deadline: Instant,
        outcome: &mut Outcome,
        live: &mut dyn FnMut(Stream, &[u8]),
        listening: &mut dyn FnMut(),
    ) -> Result<Status, End> {
        let mark = format!("{KMSG_MARK}{id}");
        let mut status = None;
        let mut seen = self.taken;
        loop {
            if let Some(status) = &status {
                let marked = self.kernel_log[seen..].iter().any(|record| record.text == mark);
                seen = self.kernel_log.len();
                if marked {
                    return Ok(Status::clone(status));
                }
            }
            // After the status only the mark is missing. The mark is a record, which `next()` does not return, so this
            // loop looks for it at short intervals.
            let until = if status.is_some() {
                deadline.min(Instant::now() + Duration::from_millis(20))
            } else {
                deadline
            };
            let frame = match self.next(until) {
                Ok(frame) => frame,
                Err(End::TimedOut) if Instant::now() < deadline => continue,
                Err(end) => return Err(end),
            };
            match frame.kind {
                Kind::Stdout => {
                    live(Stream::Stdout, &frame.payload);
                    outcome.stdout.extend_from_slice(&frame.payload);
                }
                Kind::Stderr => {
                    live(Stream::Stderr, &frame.payload);
                    outcome.stderr.extend_from_slice(&frame.payload);
                }
                Kind::Kmsg => {}
                Kind::Control => match serde_json::from_slice(&frame.payload) {
                    Ok(ToHost::Exited {
                        id: which,
                        code,
                        signal,
                        error,
                    }) if which == id => {
                        status = Some(match (code, signal, error) {
                            (_, _, Some(error)) => Status::NotStarted { error },
                            (Some(code), _, _) => Status::Exited { code },
                            (_, signal, _) => Status::Signalled {
                                signal: signal.unwrap_or(0),
                            },
                        });
                    }
                    Ok(ToHost::Listening { id: which }) if which == id => listening(),
                    Ok(ToHost::Request { id, request }) => {
                        let result = self.serve(&request).map_err(|e| Overrun::to_text(&e));
                        let _ = wire::write_control(&mut self.port, &ToGuest::Reply { id, result });
                    }
                    Ok(_) => {}
                    Err(e) => return Err(self.ended(End::Died(format!("the guest's init sent nonsense: {e}")))),
                },
            }
        }
    }
}

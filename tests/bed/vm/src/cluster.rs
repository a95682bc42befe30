// SPDX-License-Identifier: MIT OR Apache-2.0

//! Several guests at once: the nodes of a layout, joined by a network and by their NICs.
//!
//! All nodes boot at the same time. A command runs on one node or on all nodes, or a server runs on one node and its
//! client on another. One thread for each guest reads the guest's output.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use p2pmem_guest::wire::{Network, Request};
use serde_json::Value;

use crate::checks;
use crate::command::{Command, Outcome, Status};
use crate::models::{self, Models};
use crate::qemu::Ends;
use crate::topology::Layout;
use crate::vm::{Options, Place, Vm, folder, sibling};

/// The time limit for a server to listen.
const LISTEN: Duration = Duration::from_secs(120);
/// The time after its client's end that a server gets to end by itself, if it need not do so.
const SERVER_END: Duration = Duration::from_secs(20);
/// The same after a client that failed. Few servers notice such a failure.
const SERVER_END_AFTER_FAILURE: Duration = Duration::from_secs(2);
/// The time limit for a server that must end by itself.
const SERVER_MUST_END: Duration = Duration::from_secs(60);

/// Running guests. A layout without nodes has one guest, whose name is empty.
pub struct Cluster {
    // Dropped in this order: the guests, then the device process (with the last guest), then the folder.
    nodes: Vec<(String, Vm)>,
    boot_time: Duration,
    _dir: tempfile::TempDir,
}

/// How a server ends after its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServerEnd {
    /// By itself: if it does not, its time limit has passed.
    Must,
    /// By itself, or it is stopped after a while.
    May,
}

/// The outcomes of a server and its client.
#[derive(Debug)]
pub struct Served {
    /// The server's outcome.
    pub server: Outcome,
    /// The client's outcome; `None` if the server ended, or its time limit did, before it listened.
    pub client: Option<Outcome>,
}

impl Cluster {
    /// Boots all nodes of a layout.
    ///
    /// # Errors
    ///
    /// Those of [`Vm::boot`], with the node's name.
    pub fn boot(layout: &Layout, options: &Options) -> Result<Cluster> {
        let start = Instant::now();
        let dir = folder()?;
        if let [node] = layout.nodes.as_slice() {
            return Ok(Cluster {
                nodes: vec![(node.name.clone(), Vm::boot(&node.topology, options)?)],
                boot_time: start.elapsed(),
                _dir: dir,
            });
        }
        let folders = layout.nodes.iter().map(|_| folder()).collect::<Result<Vec<_>>>()?;
        let paths = folders
            .iter()
            .map(|folder| Vm::paths(folder.path()))
            .collect::<Result<Vec<_>>>()?;
        let models: Vec<Models> = if layout.nodes.iter().any(|node| node.topology.needs_fabric()) {
            models::fabric(&sibling("p2pmem-fabric")?, layout, &paths, dir.path())?
        } else {
            let accel = sibling("p2pmem-accel")?;
            let each = layout.nodes.iter().zip(&paths);
            each.map(|(node, paths)| models::one_each(&accel, &node.topology, paths))
                .collect::<Result<_>>()?
        };
        let names: Vec<String> = layout.nodes.iter().map(|node| node.name.clone()).collect();
        let ends = Ends::new(names.len(), dir.path());
        let parts = layout.nodes.iter().zip(folders).zip(models).zip(ends);
        let booted: Vec<Result<Vm>> = thread::scope(|scope| {
            let boots: Vec<_> = parts
                .map(|(((node, folder), models), ends)| {
                    let network = Network {
                        node: node.name.clone(),
                        nodes: names.clone(),
                    };
                    let place = Place { network, ends, models };
                    scope.spawn(move || Vm::boot_in(&node.topology, options, folder, place))
                })
                .collect();
            boots.into_iter().map(|boot| joined(boot.join())).collect()
        });
        let nodes = names.into_iter().zip(booted).map(|(name, vm)| {
            let vm = vm.with_context(|| format!("node {name:?}"))?;
            Ok((name, vm))
        });
        Ok(Cluster {
            nodes: nodes.collect::<Result<_>>()?,
            boot_time: start.elapsed(),
            _dir: dir,
        })
    }

    /// Returns the time from the start until all guests were ready for commands.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// Returns the names of the nodes, in the order of the layout.
    pub fn names(&self) -> Vec<String> {
        self.nodes.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Returns the node `name`.
    ///
    /// # Errors
    ///
    /// There is no node of this name.
    pub fn node(&mut self, name: &str) -> Result<&mut Vm> {
        let found = self.nodes.iter_mut().find(|(node, _)| node == name);
        Ok(&mut found.with_context(|| format!("there is no node {name:?}"))?.1)
    }

    /// Returns the only node of a layout with one node.
    ///
    /// # Errors
    ///
    /// There are several nodes.
    pub fn only(&mut self) -> Result<&mut Vm> {
        match self.nodes.as_mut_slice() {
            [(_, vm)] => Ok(vm),
            nodes => bail!("there are {} nodes, say which", nodes.len()),
        }
    }

    /// Returns whether all guests can still run commands.
    pub fn is_alive(&self) -> bool {
        self.nodes.iter().all(|(_, vm)| vm.is_alive())
    }

    /// Returns the findings of the nodes' debug kernels: see [`checks::run`]. Other kernels have no findings.
    ///
    /// # Errors
    ///
    /// Those of [`checks::run`].
    pub fn check(&mut self) -> Result<Vec<String>> {
        let found = thread::scope(|scope| {
            let checks: Vec<_> = self
                .nodes
                .iter_mut()
                .map(|(name, vm)| {
                    scope.spawn(move || {
                        let found = checks::run(vm).with_context(|| format!("node {name:?}"))?;
                        Ok(found.into_iter().map(|line| of_node(name, line)).collect::<Vec<_>>())
                    })
                })
                .collect();
            checks
                .into_iter()
                .map(|check| joined(check.join()))
                .collect::<Result<Vec<_>>>()
        })?;
        Ok(found.concat())
    }

    /// Returns the process ids of all processes that the cluster started.
    pub fn process_ids(&self) -> Vec<u32> {
        let mut ids: Vec<u32> = self.nodes.iter().flat_map(|(_, vm)| vm.process_ids()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Runs a command on one node.
    ///
    /// # Errors
    ///
    /// Those of [`Vm::exec`] and [`Cluster::node`].
    pub fn exec(&mut self, node: &str, command: &Command) -> Result<Outcome> {
        self.node(node)?.exec(command, &mut |_, _| {})
    }

    /// Runs a command on every node at the same time. Returns the outcomes by node.
    ///
    /// # Errors
    ///
    /// Those of [`Vm::exec`].
    pub fn exec_all(&mut self, command: impl Fn(&str) -> Command + Sync) -> Result<BTreeMap<String, Outcome>> {
        let command = &command;
        thread::scope(|scope| {
            let runs: Vec<_> = self
                .nodes
                .iter_mut()
                .map(|(name, vm)| {
                    scope.spawn(move || {
                        let outcome = vm.exec(&command(name), &mut |_, _| {});
                        Ok((name.clone(), outcome.with_context(|| format!("node {name:?}"))?))
                    })
                })
                .collect();
            runs.into_iter().map(|run| joined(run.join())).collect()
        })
    }

    /// Runs a server on one node, and its client on another node as soon as the server listens on its port
    /// ([`Command::listen`]). A server that does not listen in time is killed and has [`Status::TimedOut`]. A server
    /// that does not end by itself soon after its client is killed (sooner if the client failed) and has
    /// [`Status::Stopped`].
    ///
    /// # Errors
    ///
    /// Those of [`Vm::exec`]; both nodes are the same, or one of them does not exist.
    pub fn serve(&mut self, server: (&str, &Command), client: (&str, &Command)) -> Result<Served> {
        self.serve_with(server, client, ServerEnd::May)
    }

    /// As [`Cluster::serve`], for a server that must end by itself, whether its client succeeds or fails. A server that
    /// does not end in time has [`Status::TimedOut`].
    ///
    /// # Errors
    ///
    /// Those of [`Cluster::serve`].
    pub fn serve_to_the_end(&mut self, server: (&str, &Command), client: (&str, &Command)) -> Result<Served> {
        self.serve_with(server, client, ServerEnd::Must)
    }

    fn serve_with(&mut self, server: (&str, &Command), client: (&str, &Command), end: ServerEnd) -> Result<Served> {
        let (server_name, command) = server;
        let [server_vm, client_vm] = self.two(server_name, client.0)?;
        let slow = server_vm.kernel().time_factor;
        let stopper = server_vm.stopper();
        let (send, said) = mpsc::channel();
        thread::scope(|scope| {
            let run = scope.spawn(move || {
                let listening = send.clone();
                let outcome = server_vm.exec_server(command, &mut |_, _| {}, &mut || {
                    // An error means that the receiver no longer waits.
                    let _ = listening.send(());
                });
                // The client's thread waits for this drop after its end.
                drop((send, listening));
                outcome
            });
            let answer = said.recv_timeout(LISTEN.min(command.limit) * slow);
            let outcome = match answer {
                Ok(()) => Some(client_vm.exec(client.1, &mut |_, _| {})),
                Err(_) => None,
            };
            let fine = |outcome: &Outcome| outcome.status == Status::Exited { code: 0 };
            let has_ended = |limit: Duration| {
                let answer = said.recv_timeout(limit * slow);
                matches!(answer, Err(RecvTimeoutError::Disconnected))
            };
            let limit = match &outcome {
                _ if end == ServerEnd::Must => SERVER_MUST_END,
                Some(Ok(outcome)) if fine(outcome) => SERVER_END,
                _ => SERVER_END_AFTER_FAILURE,
            };
            if answer == Err(RecvTimeoutError::Timeout) {
                stopper.time_out();
            } else if !has_ended(limit) {
                if end == ServerEnd::Must {
                    stopper.time_out();
                } else {
                    stopper.stop();
                }
            }
            let server = joined(run.join()).with_context(|| format!("node {server_name:?}"))?;
            let client = outcome.transpose().with_context(|| format!("node {:?}", client.0))?;
            Ok(Served { server, client })
        })
    }

    fn two(&mut self, first: &str, second: &str) -> Result<[&mut Vm; 2]> {
        let mut found = [None, None];
        for (name, vm) in &mut self.nodes {
            if let Some(index) = [first, second].iter().position(|wanted| wanted == name) {
                found[index] = Some(vm);
            }
        }
        match found {
            [Some(first), Some(second)] => Ok([first, second]),
            _ => bail!("{first:?} and {second:?} are not two of these nodes"),
        }
    }

    /// Returns the present counters of all devices of all nodes: node, device, and the result of [`Vm::snapshot`].
    ///
    /// # Errors
    ///
    /// Those of [`Vm::snapshot`].
    pub fn snapshot(&mut self) -> Result<Value> {
        let mut all = serde_json::Map::new();
        for (name, vm) in &mut self.nodes {
            all.insert(name.clone(), vm.snapshot().with_context(|| format!("node {name:?}"))?);
        }
        Ok(Value::Object(all))
    }

    /// Sends a request to the control socket of a device. Returns the answer.
    ///
    /// # Errors
    ///
    /// The device does not exist, or its process refuses the request.
    pub fn control(&mut self, node: &str, device: &str, request: Value) -> Result<Value> {
        let name = device.to_owned();
        self.node(node)?.serve(&Request::Control { name, request })
    }

    /// As [`Cluster::power_off`], if the caller does not wait for the guests again.
    ///
    /// # Errors
    ///
    /// Those of [`Cluster::power_off`].
    pub fn shut_down(mut self) -> Result<Vec<String>> {
        self.power_off()
    }

    /// Powers all guests off. Returns the bad lines of their kernel logs that no command has returned.
    ///
    /// # Errors
    ///
    /// A guest does not power off in time. The call can be repeated.
    pub fn power_off(&mut self) -> Result<Vec<String>> {
        thread::scope(|scope| {
            let ends: Vec<_> = self
                .nodes
                .iter_mut()
                .map(|(name, vm)| {
                    scope.spawn(move || {
                        let findings = vm.power_off().with_context(|| format!("node {name:?}"))?;
                        Ok(findings.into_iter().map(|line| of_node(name, line)))
                    })
                })
                .collect();
            let mut findings = Vec::new();
            for end in ends {
                findings.extend(joined(end.join())?);
            }
            Ok(findings)
        })
    }
}

/// Prefixes a line with the name of its node, if the layout has several.
fn of_node(name: &str, line: String) -> String {
    if name.is_empty() {
        line
    } else {
        format!("{name}: {line}")
    }
}

fn joined<T>(result: thread::Result<Result<T>>) -> Result<T> {
    result.unwrap_or_else(|panic| {
        let why = panic.downcast_ref::<String>().map(String::as_str);
        Err(anyhow!(
            "a thread of the runner panicked: {}",
            why.unwrap_or("no message")
        ))
    })
}

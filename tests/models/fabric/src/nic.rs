// SPDX-License-Identifier: MIT OR Apache-2.0

//! Control requests of NICs, and the subnet of a configuration.

use std::num::NonZeroU64;
use std::time::Duration;

use p2pmem_ib::{Fabric, Faults, Topology, TopologyError};
use p2pmem_mlx5::{Handle, HoldRequest};
use serde::Serialize;
use serde_json::Value;

use crate::config::Config;
use crate::control::{ControlTarget, HeldTransfer, LinkFaults};

impl Config {
    /// Creates the subnet that connects the NICs.
    ///
    /// # Errors
    ///
    /// The switches and links form no valid topology.
    pub fn subnet(&self) -> Result<Fabric, TopologyError> {
        let topology = Topology {
            switches: self.switch.iter().map(|switch| switch.name.clone()).collect(),
            links: self.link.clone(),
        };
        Fabric::new(&topology, self.seed)
    }
}

/// Converts the result of a request to the NIC into JSON, or into an error message.
fn json<T: Serialize>(answer: Result<T, impl std::fmt::Display>) -> Result<Value, String> {
    let answer = answer.map_err(|error| error.to_string())?;
    serde_json::to_value(answer).map_err(|error| error.to_string())
}

impl ControlTarget for Handle {
    fn counters(&self) -> Result<Value, String> {
        json(self.report())
    }

    fn reset_counters(&self) -> Result<(), String> {
        self.reset_counters().map_err(|error| error.to_string())
    }

    fn state(&self) -> Result<Value, String> {
        json(self.status())
    }

    fn set_link(&self, up: bool) -> Result<(), String> {
        self.set_link(up).map_err(|error| error.to_string())
    }

    fn set_faults(&self, faults: LinkFaults) -> Result<(), String> {
        let faults = Faults {
            delay: Duration::from_micros(faults.delay_us.into()),
            loss: faults.loss,
            lose_nth: faults.lose_nth,
            duplicate: faults.duplicate,
            reorder: faults.reorder,
        };
        self.set_faults(faults).map_err(|error| error.to_string())
    }

    fn set_rate(&self, bytes_per_second: Option<NonZeroU64>) -> Result<(), String> {
        self.set_rate(bytes_per_second).map_err(|error| error.to_string())
    }

    fn hold(&self, transfer: Option<HeldTransfer>) -> Result<(), String> {
        match transfer {
            None => self.release(),
            Some(HeldTransfer { qpn, write, min_bytes }) => self.hold(HoldRequest { qpn, write, min_bytes }),
        }
        Ok(())
    }

    fn held(&self) -> Result<Value, String> {
        serde_json::to_value(self.held()).map_err(|error| error.to_string())
    }

    fn set_drain(&self, on: bool) -> Result<(), String> {
        self.set_drain(on);
        Ok(())
    }

    fn start_trace(&self, most: usize) -> Result<(), String> {
        self.start_trace(most);
        Ok(())
    }

    fn take_trace(&self) -> Result<Value, String> {
        serde_json::to_value(self.take_trace()).map_err(|error| error.to_string())
    }

    fn fail(&self, syndrome: u8) -> Result<(), String> {
        self.fail(syndrome);
        Ok(())
    }
}

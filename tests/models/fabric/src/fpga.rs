// SPDX-License-Identifier: MIT OR Apache-2.0

//! Control requests of FPGAs.

use p2pmem_fpga::Shared;
use p2pmem_fpga_regs::Counter;
use serde_json::{Map, Value, json};

use crate::control::ControlTarget;

impl ControlTarget for Shared {
    fn counters(&self) -> Result<Value, String> {
        let values = self.counters();
        let by_name = |(counter, name): &(Counter, &str)| ((*name).to_owned(), json!(values[*counter as usize]));
        let all: Map<String, Value> = Counter::ALL.iter().map(by_name).collect();
        Ok(Value::Object(all))
    }

    fn reset_counters(&self) -> Result<(), String> {
        self.reset_counters();
        Ok(())
    }

    fn state(&self) -> Result<Value, String> {
        serde_json::to_value(self.state()).map_err(|error| error.to_string())
    }
}

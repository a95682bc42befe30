// SPDX-License-Identifier: GPL-2.0

//! p2pmem: a manager of PCI peer-to-peer memory.
use kernel::prelude::*;
mod sys;
module! {
    type: P2pmem,
    name: "p2pmem",
    authors: ["The p2pmem developers"],
    description: "Manager of PCI peer-to-peer memory",
    license: "GPL",
}
struct P2pmem;
impl kernel::Module for P2pmem {
    fn init(_module: &'static ThisModule) -> Result<Self> { Ok(P2pmem) }
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! Commands and doorbells with arbitrary content.

use std::sync::Arc;

use p2pmem_ib::{Fabric, PortConfig, Topology};
use p2pmem_proptest::config;
use p2pmem_vfio_user::Bus;
use proptest::prelude::*;

use super::*;
use crate::counters::Counters;
use crate::inbox::Message;
use crate::model::{Identity, TransportWorker};
use crate::registers::{Registers, VECTORS};

fn model() -> TransportWorker {
    let topology = Topology {
        switches: vec!["sw".to_owned()],
        links: Vec::new(),
    };
    let config = PortConfig {
        name: "nic".to_owned(),
        guid: 0x10,
        switch: "sw".to_owned(),
        bytes_per_second: None,
    };
    let port = Fabric::new(&topology, 1).unwrap().join(&config, drop).unwrap();
    let identity = Identity {
        name: config.name,
        node_guid: 0x10,
        port_guid: 0x10,
    };
    let registers = Arc::new(Registers::new());
    let bus = Bus::new(VECTORS);
    let hca = Hca::new(identity, bus, registers, Arc::new(Counters::default()), port);
    TransportWorker::new(Arc::new(Adapter::new(hca, Arc::default(), Arc::default())))
}

fn status(output: &[u8]) -> u32 {
    ifc::nop_out::STATUS.get32(output)
}

/// Executes a command whose input is zero except for the opcode and the fields that `fill` sets.
fn send(model: &mut TransportWorker, opcode: u16, fill: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let spec = find(opcode).unwrap();
    let mut input = vec![0; spec.input + 64];
    ifc::nop_in::OPCODE.set(&mut input, opcode);
    fill(&mut input);
    model.execute(&input, spec.output)
}

fn initialised() -> TransportWorker {
    let mut model = model();
    for opcode in [
        op::ENABLE_HCA,
        op::INIT_HCA,
        op::ALLOC_UAR,
        op::ALLOC_PD,
        op::ALLOC_XRCD,
    ] {
        assert_eq!(status(&send(&mut model, opcode, |_| {})), 0);
    }
    model
}

#[test]
fn commands_require_their_initialisation_phase() {
    let mut model = model();
    let bad_state = constants::MLX5_CMD_STAT_BAD_SYS_STATE_ERR;
    assert_eq!(status(&send(&mut model, op::ALLOC_PD, |_| {})), bad_state);
    assert_eq!(status(&send(&mut model, op::INIT_HCA, |_| {})), bad_state);
    assert_eq!(status(&send(&mut model, op::ENABLE_HCA, |_| {})), 0);
    assert_eq!(status(&send(&mut model, op::ALLOC_PD, |_| {})), bad_state);
    assert_eq!(status(&send(&mut model, op::INIT_HCA, |_| {})), 0);
    assert_eq!(status(&send(&mut model, op::INIT_HCA, |_| {})), bad_state);
    assert_eq!(status(&send(&mut model, op::DISABLE_HCA, |_| {})), bad_state);
    assert_eq!(status(&send(&mut model, op::ALLOC_PD, |_| {})), 0);
    assert_eq!(status(&send(&mut model, op::TEARDOWN_HCA, |_| {})), 0);
    assert_eq!(status(&send(&mut model, op::ALLOC_PD, |_| {})), bad_state);
}

#[test]
fn exhausted_numbers_return_no_resources() {
    let mut model = initialised();
    let mut last = 0;
    for _ in 0..1 << 12 {
        last = status(&send(&mut model, op::ALLOC_UAR, |_| {}));
        if last != 0 {
            break;
        }
    }
    assert_eq!(last, constants::MLX5_CMD_STAT_NO_RES_ERR);
}

/// A random command. Most words are small, so that they are valid object numbers and sizes.
fn input() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        6 => Just(0_u32),
        3 => 0_u32..0x60,
        2 => (0_u32..32).prop_map(|bit| 1 << bit),
        1 => any::<u32>(),
    ];
    let opcode = prop_oneof![
        20 => proptest::sample::select((0x100..0xc00).filter(|opcode| find(*opcode).is_some()).collect::<Vec<u16>>()),
        1 => any::<u16>(),
    ];
    (opcode, proptest::collection::vec(word, 0..160)).prop_map(|(opcode, words)| {
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        if bytes.len() < 16 {
            bytes.resize(16, 0);
        }
        ifc::nop_in::OPCODE.set(&mut bytes, opcode);
        bytes
    })
}

proptest! {
    #![proptest_config(config(if cfg!(debug_assertions) { 200 } else { 2000 }))]

    /// Each command gets an output of the requested length, and no command panics.
    #[test]
    fn arbitrary_command_gets_output(inputs in proptest::collection::vec((input(), 16_usize..700), 1..60)) {
        let mut model = initialised();
        for (input, output_len) in inputs {
            let output = model.execute(&input, output_len);
            prop_assert_eq!(output.len(), output_len);
            model.run();
        }
    }

    /// No doorbell panics.
    #[test]
    fn arbitrary_doorbell_is_handled(doorbells in proptest::collection::vec((0_u8..4, 0_u32..40, any::<u32>(), any::<u32>()), 1..40)) {
        let mut model = initialised();
        for (kind, small, first, second) in doorbells {
            let message = match kind {
                0 => Message::Command { queue: u64::from(first) << 20, entries: second },
                1 => Message::EqDoorbell { uar: small, eqn: first as u8, consumer: second & 0xff_ffff, arm: true },
                2 => Message::ArmCq { uar: small, words: [first, second] },
                _ => Message::SendDoorbell { uar: small, qpn: second & 0xff_ffff },
            };
            match message {
                Message::Command { queue, entries } => handle_doorbell(&model.adapter, queue, entries),
                Message::SendDoorbell { .. } => prop_assert!(model.handle(message)),
                _ => model.adapter.hca().doorbell(&message),
            }
            model.adapter.run_umr_engine();
            model.run();
        }
    }
}

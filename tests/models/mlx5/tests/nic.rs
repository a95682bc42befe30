// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the adapter from the driver's side: commands, queues, events, payload, errors, resets.

#[path = "nic/inflight.rs"]
mod inflight;
#[path = "nic/trace.rs"]
mod trace;

use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use p2pmem_ib::{Fabric, Topology};
use p2pmem_mlx5::layout::{constants, ifc, op, wire};
use p2pmem_mlx5_driver::{self as driver, Driver, ENTRIES, LOG_ENTRIES, RAM, Refused, data, ended, remote, until};

const RC: u32 = constants::MLX5_QP_ST_RC;
const UD: u32 = constants::MLX5_QP_ST_UD;
const GUID: u64 = 0x0002_c903_0000_1000;
const BAD_OPCODE: u32 = constants::MLX5_CMD_STAT_BAD_OP_ERR;
const BAD_PARAMETER: u32 = constants::MLX5_CMD_STAT_BAD_PARAM_ERR;
const BAD_STATE: u32 = constants::MLX5_CMD_STAT_BAD_SYS_STATE_ERR;
const BAD_RESOURCE: u32 = constants::MLX5_CMD_STAT_BAD_RES_ERR;
const BUSY: u32 = constants::MLX5_CMD_STAT_RES_BUSY;
const SHORT_INPUT: u32 = constants::MLX5_CMD_STAT_BAD_INP_LEN_ERR;
const SHORT_OUTPUT: u32 = constants::MLX5_CMD_STAT_BAD_OUTP_LEN_ERR;

fn fabric() -> Fabric {
    let topology = Topology {
        switches: vec!["sw".to_owned()],
        links: Vec::new(),
    };
    Fabric::new(&topology, 1).unwrap()
}

/// Creates an initialized adapter.
fn adapter() -> Driver {
    let mut driver = Driver::new("nic", GUID, &fabric());
    driver.init();
    driver
}

fn raised(interrupt: &OwnedFd) -> bool {
    let mut value = [0; 8];
    rustix::io::read(interrupt, &mut value).is_ok()
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed)
        .collect()
}

#[test]
fn initialisation_and_command_errors() {
    let mut driver = Driver::new("nic", GUID, &fabric());
    assert_eq!(driver.register(0x4) >> 16, 5, "command interface revision");
    let query = |driver: &mut Driver, mode: u32| {
        driver.run(
            op::QUERY_HCA_CAP,
            ifc::query_hca_cap_in::BYTES,
            ifc::query_hca_cap_out::BYTES,
            |input| ifc::query_hca_cap_in::OP_MOD.set(input, mode),
        )
    };
    assert_eq!(query(&mut driver, 1), Err(Refused::Status(BAD_STATE)));
    driver.init();
    let caps = query(&mut driver, 1).unwrap();
    let caps = ifc::query_hca_cap_out::CAPABILITY.of(&caps);
    assert_eq!(ifc::cmd_hca_cap::NUM_PORTS.get(caps), 1);
    assert_eq!(ifc::cmd_hca_cap::IB_VIRT.get(caps), 1);
    assert_eq!(ifc::cmd_hca_cap::LOG_MAX_QP.get(caps), 16);
    // Unsupported capability type.
    assert_eq!(query(&mut driver, 1 | (4 << 1)), Err(Refused::Status(BAD_PARAMETER)));
    assert!(driver.lid() >= 2);
    // Unknown opcodes are refused and counted.
    let unknown = driver.run(op::CREATE_TIR, 512, 64, |_| {});
    assert_eq!(unknown, Err(Refused::Status(BAD_OPCODE)));
    let report = driver.handle.report().unwrap();
    assert_eq!(report.adapter.unknown.get("command 0x900 CREATE_TIR"), Some(&1));
    // Too short input, and too short output.
    let len = ifc::create_cq_in::BYTES;
    let short = driver.run(op::CREATE_CQ, len - 4, 16, |_| {});
    assert_eq!(short, Err(Refused::Status(SHORT_INPUT)));
    let short = driver.run(op::QUERY_CQ, 16, ifc::query_cq_out::BYTES - 4, |_| {});
    assert_eq!(short, Err(Refused::Status(SHORT_OUTPUT)));
}

#[test]
fn invalid_command_entries_have_delivery_status() {
    let mut driver = adapter();
    let entry = RAM;
    // A command with an unknown opcode and a mailbox.
    let block = RAM + 0x1000;
    driver.submit(0, &[0; 64], 16);
    assert_eq!(driver.answer(0, 16), Err(Refused::Status(BAD_OPCODE)));
    for (offset, value, delivery) in [
        // Token and block number of the first input mailbox.
        (block + 573, vec![1], 2),
        (block + 568, vec![0, 0, 0, 9], 3),
        // Fields of the entry: type, input length, output length, input pointer.
        (entry, vec![6], 0x10),
        (entry + 4, vec![0xff, 0, 0, 0], 7),
        (entry + 4, vec![0, 0, 0, 7], 7),
        (entry + 56, vec![0xff, 0, 0, 0], 8),
        (entry + 8, vec![0; 8], 5),
        (entry + 8, u64::to_be_bytes(RAM - 0x1000).to_vec(), 6),
    ] {
        driver.submit(1, &[0; 16], 16);
        let _ = driver.answer(1, 16);
        // Submit a valid command, modify it, and ring the doorbell again.
        let mut good = vec![0; 64];
        ifc::nop_in::OPCODE.set(&mut good, op::NOP);
        driver.submit(0, &good, 16);
        assert!(driver.answer(0, 16).is_ok());
        let saved = driver.read(entry, 64);
        let mailbox = driver.read(block, 576);
        driver.write(offset, &value);
        driver.write(entry + 63, &[1]);
        driver.write_register(0x18, 1);
        assert_eq!(driver.answer(0, 16), Err(Refused::Delivery(delivery)), "{offset:#x}");
        driver.write(entry, &saved);
        driver.write(block, &mailbox);
    }
    // A command queue without memory: no command completes, and the adapter keeps working.
    driver.write_register(0x10, 0);
    driver.write_register(0x18, 1);
    driver.write_register(0x10, (RAM >> 32) as u32);
    driver.run(op::NOP, 16, 16, |_| {}).unwrap();
}

#[test]
fn command_events_are_posted_once_eq_exists() {
    let mut driver = adapter();
    let command = constants::MLX5_EVENT_TYPE_CMD;
    let mut events = driver.event_queue(3, &[command]);
    assert_eq!(driver.event(&mut events), None, "CREATE_EQ itself posts no event");
    driver.arm_events(&events);
    driver.submit(5, &pattern(16, 0), 16);
    let event = until("event", || driver.event(&mut events));
    assert_eq!(wire::eqe::TYPE.get32(&event), command);
    assert_eq!(wire::eqe::DATA.field(wire::eqe_cmd::VECTOR).get(&event), 1 << 5);
    let interrupt = driver.interrupts[3].try_clone().unwrap();
    until("interrupt", || raised(&interrupt).then_some(()));
    // Without another arm doorbell, further events raise no interrupt.
    driver.submit(6, &pattern(16, 0), 16);
    until("event", || driver.event(&mut events));
    assert!(!raised(&interrupt));
    driver.arm_events(&events);
    // A second EQ for the same event type is refused. DESTROY_EQ of the first one posts no event.
    let refused = driver.run(op::CREATE_EQ, ifc::create_eq_in::BYTES + 8, 16, |input| {
        ifc::create_eq_in::EVENT_BITMASK.at(0).set(input, 1_u64 << command);
        let context = ifc::create_eq_in::EQ_CONTEXT_ENTRY.of_mut(input);
        ifc::eqc::UAR_PAGE.set(context, 16_u32);
    });
    assert_eq!(refused, Err(Refused::Status(BUSY)));
    until("event", || driver.event(&mut events));
    let number = events.number;
    let destroy = |input: &mut [u8]| ifc::destroy_eq_in::EQ_NUMBER.set(input, number);
    driver.run(op::DESTROY_EQ, 16, 16, destroy).unwrap();
    assert_eq!(driver.event(&mut events), None);
    let again = driver.run(op::DESTROY_EQ, 16, 16, destroy);
    assert_eq!(again, Err(Refused::Status(BAD_RESOURCE)));
}

#[test]
fn objects_in_use_cannot_be_destroyed() {
    let mut driver = adapter();
    let events = driver.event_queue(1, &[]);
    let cq = driver.completion_queue(events.number, LOG_ENTRIES, |_| {});
    let qp = driver.queue_pair(RC, &cq, |_| {});
    let (uar, pd) = (driver.uar, driver.pd);
    let busy = Err(Refused::Status(BUSY));
    let mut run = |opcode, number: u32| driver.run(opcode, 16, 16, |input| ifc::dealloc_pd_in::PD.set(input, number));
    assert_eq!(run(op::DEALLOC_PD, pd), busy);
    assert_eq!(run(op::DEALLOC_UAR, uar), busy);
    assert_eq!(run(op::DESTROY_CQ, cq.number), busy);
    run(op::DESTROY_QP, qp.number).unwrap();
    assert_eq!(run(op::DESTROY_QP, qp.number), Err(Refused::Status(BAD_RESOURCE)));
    run(op::DESTROY_CQ, cq.number).unwrap();
    run(op::DEALLOC_PD, pd).unwrap();
    // A destroyed object cannot be used.
    let cq = driver.completion_queue(events.number, LOG_ENTRIES, |_| {});
    let result = driver.try_queue_pair(RC, &cq, |_| {});
    assert_eq!(
        result.err(),
        Some(Refused::Status(BAD_RESOURCE)),
        "the protection domain does not exist"
    );
}

#[test]
fn path_attributes_out_of_range_are_refused() {
    let mut driver = adapter();
    let events = driver.event_queue(1, &[]);
    let cq = driver.completion_queue(events.number, LOG_ENTRIES, |_| {});
    let qp = driver.queue_pair(RC, &cq, |_| {});
    let mut begin = |pkey_index: u32| {
        driver.modify(op::RST2INIT_QP, &qp, 0, |context| {
            ifc::ads::PKEY_INDEX.set(ifc::qpc::PRIMARY_ADDRESS_PATH.of_mut(context), pkey_index);
        })
    };
    // The P_Key table has 128 entries, the GID table 8, and the codes of the MTU are 1 to 5.
    assert_eq!(begin(128), Err(Refused::Status(BAD_PARAMETER)));
    assert_eq!(begin(127), Ok(()));
    let mut connect = |mtu: u32, gid_index: u32| {
        driver.modify(op::INIT2RTR_QP, &qp, 0, |context| {
            ifc::qpc::MTU.set(context, mtu);
            let path = ifc::qpc::PRIMARY_ADDRESS_PATH.of_mut(context);
            ifc::ads::GRH.set(path, 1_u32);
            ifc::ads::SRC_ADDR_INDEX.set(path, gid_index);
        })
    };
    for (mtu, gid_index) in [(0, 0), (6, 0), (7, 0), (5, 8)] {
        assert_eq!(connect(mtu, gid_index), Err(Refused::Status(BAD_PARAMETER)));
    }
    assert_eq!(connect(5, 7), Ok(()));
}

#[test]
fn port_offers_no_missing_capability() {
    let mut driver = adapter();
    let (input, output) = (
        ifc::query_hca_vport_context_in::BYTES,
        ifc::query_hca_vport_context_out::BYTES,
    );
    let out = driver.run(op::QUERY_HCA_VPORT_CONTEXT, input, output, |_| {}).unwrap();
    let context = ifc::query_hca_vport_context_out::HCA_VPORT_CONTEXT.of(&out);
    let offered = ifc::hca_vport_context::CAP_MASK1.get32(context);
    // Traps, automatic path migration, SL mapping.
    assert_eq!(offered & ((1 << 3) | (1 << 5) | (1 << 6)), 0, "{offered:#x}");
}

/// Creates an EQ, a CQ, and an RC QP that is connected to itself.
fn loopback(driver: &mut Driver) -> (driver::Ring, driver::Ring, driver::Qp) {
    let events = driver.event_queue(1, &[]);
    let cq = driver.completion_queue(events.number, LOG_ENTRIES, |_| {});
    let qp = driver.queue_pair(RC, &cq, |_| {});
    let lid = driver.lid();
    driver.connect(&qp, lid, qp.number);
    (events, cq, qp)
}

#[test]
fn send_write_and_read_transfer_data() {
    let mut driver = adapter();
    let (_, mut cq, mut qp) = loopback(&mut driver);
    let key = driver.key;
    let (from, to) = (driver.alloc(1 << 20), driver.alloc(1 << 20));
    // A message of several packets, into three scatter entries.
    let bytes = pattern(5000, 1);
    driver.write(from, &bytes);
    driver.receive(
        &mut qp,
        &[(key, to, 1000), (key, to + 8192, 24), (key, to + 1000, 8000)],
    );
    driver.send(
        &mut qp,
        constants::MLX5_OPCODE_SEND_IMM,
        0xdead_beef,
        &[data((key, from, 5000))],
    );
    let (mut sent, mut received) = (None, None);
    for _ in 0..2 {
        let entry = driver.wait(&mut cq);
        match ended(&entry).0 {
            constants::MLX5_CQE_REQ => sent = Some(entry),
            _ => received = Some(entry),
        }
    }
    let (sent, received) = (sent.unwrap(), received.unwrap());
    assert_eq!(
        wire::cqe64::SOP_DROP_QPN.get32(&sent),
        (constants::MLX5_OPCODE_SEND_IMM << 24) | qp.number
    );
    assert_eq!(ended(&received).0, constants::MLX5_CQE_RESP_SEND_IMM);
    assert_eq!(wire::cqe64::IMMEDIATE.get(&received), 0xdead_beef);
    assert_eq!(wire::cqe64::BYTE_CNT.get(&received), 5000);
    assert_eq!(driver.read(to, 1000), bytes[..1000]);
    assert_eq!(driver.read(to + 8192, 24), bytes[1000..1024]);
    assert_eq!(driver.read(to + 1000, 3976), bytes[1024..]);
    // RDMA WRITE, then RDMA READ to another address.
    driver.send(
        &mut qp,
        constants::MLX5_OPCODE_RDMA_WRITE,
        0,
        &[remote(key, to + 0x1_0003), data((key, from, 5000))],
    );
    assert_eq!(ended(&driver.wait(&mut cq)).0, constants::MLX5_CQE_REQ);
    assert_eq!(driver.read(to + 0x1_0003, 5000), bytes);
    driver.send(
        &mut qp,
        constants::MLX5_OPCODE_RDMA_READ,
        0,
        &[remote(key, to + 0x1_0003), data((key, to + 0x2_0000, 5000))],
    );
    let read = driver.wait(&mut cq);
    assert_eq!(ended(&read).0, constants::MLX5_CQE_REQ);
    assert_eq!(wire::cqe64::BYTE_CNT.get(&read), 5000);
    assert_eq!(driver.read(to + 0x2_0000, 5000), bytes);
    // Inline data.
    let mut inline = vec![0; 16];
    wire::wqe_inline_seg::BYTE_COUNT.set(&mut inline, constants::MLX5_INLINE_SEG | 11);
    inline[4..15].copy_from_slice(b"hello world");
    driver.send(
        &mut qp,
        constants::MLX5_OPCODE_RDMA_WRITE,
        0,
        &[remote(key, to), inline],
    );
    assert_eq!(ended(&driver.wait(&mut cq)).0, constants::MLX5_CQE_REQ);
    assert_eq!(driver.read(to, 11), b"hello world");
    let report = driver.handle.report().unwrap();
    assert_eq!(report.payload.host_written, 5000 * 3 + 11);
    assert_eq!(report.payload.host_read, 5000 * 3);
    assert_eq!(report.transport.retransmissions, 0);
}

#[test]
fn atomics_return_old_value() {
    let mut driver = adapter();
    let (_, mut cq, mut qp) = loopback(&mut driver);
    let key = driver.key;
    let (target, result) = (driver.alloc(4096), driver.alloc(4096));
    driver.write(target, &41_u64.to_be_bytes());
    let segment = |swap: u64, compare: u64| [swap.to_be_bytes(), compare.to_be_bytes()].concat();
    for (opcode, swap, compare, before, after) in [
        (constants::MLX5_OPCODE_ATOMIC_FA, 1, 0, 41, 42),
        (constants::MLX5_OPCODE_ATOMIC_CS, 7, 41, 42, 42),
        (constants::MLX5_OPCODE_ATOMIC_CS, 7, 42, 42, 7_u64),
    ] {
        driver.send(
            &mut qp,
            opcode,
            0,
            &[remote(key, target), segment(swap, compare), data((key, result, 8))],
        );
        let entry = driver.wait(&mut cq);
        assert_eq!(ended(&entry).0, constants::MLX5_CQE_REQ);
        // Big-endian, because the driver did not select host order.
        assert_eq!(driver.read(result, 8), u64::to_be_bytes(before));
        assert_eq!(driver.read(target, 8), after.to_be_bytes());
    }
}

#[test]
fn errors_have_their_syndrome() {
    let mut driver = adapter();
    let key = driver.key;
    let from = driver.alloc(4096);
    let events = driver.event_queue(1, &[]);
    let lid = driver.lid();
    let flushed = constants::MLX5_CQE_SYNDROME_WR_FLUSH_ERR;
    for (local, far, expected) in [
        (key ^ 1, key, constants::MLX5_CQE_SYNDROME_LOCAL_PROT_ERR),
        (key, key ^ 1, constants::MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR),
    ] {
        let mut cq = driver.completion_queue(events.number, LOG_ENTRIES, |_| {});
        let far_cq = driver.completion_queue(events.number, LOG_ENTRIES, |_| {});
        let mut qp = driver.queue_pair(RC, &cq, |_| {});
        let far_qp = driver.queue_pair(RC, &far_cq, |_| {});
        driver.connect(&qp, lid, far_qp.number);
        driver.connect(&far_qp, lid, qp.number);
        driver.receive(&mut qp, &[(key, from, 64)]);
        for _ in 0..2 {
            let segments = [remote(far, from), data((local, from, 64))];
            driver.send(&mut qp, constants::MLX5_OPCODE_RDMA_WRITE, 0, &segments);
        }
        assert_eq!(ended(&driver.wait(&mut cq)), (constants::MLX5_CQE_REQ_ERR, expected));
        let mut others = [ended(&driver.wait(&mut cq)), ended(&driver.wait(&mut cq))];
        others.sort_unstable();
        assert_eq!(
            others,
            [
                (constants::MLX5_CQE_REQ_ERR, flushed),
                (constants::MLX5_CQE_RESP_ERR, flushed)
            ]
        );
        // Receives that are posted in the error state are flushed too.
        driver.receive(&mut qp, &[(key, from, 64)]);
        assert_eq!(ended(&driver.wait(&mut cq)), (constants::MLX5_CQE_RESP_ERR, flushed));
        let out = driver.run(
            op::QUERY_QP,
            ifc::query_qp_in::BYTES,
            ifc::query_qp_out::BYTES,
            |input| {
                ifc::query_qp_in::QPN.set(input, qp.number);
            },
        );
        let context = ifc::query_qp_out::QPC.of(out.as_ref().unwrap()).to_vec();
        assert_eq!(ifc::qpc::STATE.get32(&context), constants::MLX5_QPC_STATE_ERR);
        driver.end(op::_2RST_QP, &qp).unwrap();
    }
}

#[test]
fn malformed_wqes_are_errors() {
    let mut driver = adapter();
    let key = driver.key;
    let from = driver.alloc(4096);
    // An unknown opcode; a WRITE without remote address segment; an inline segment that exceeds the WQE.
    let mut long = vec![0; 16];
    wire::wqe_inline_seg::BYTE_COUNT.set(&mut long, constants::MLX5_INLINE_SEG | 500);
    for (opcode, segments) in [
        (0x77, vec![data((key, from, 8))]),
        (constants::MLX5_OPCODE_RDMA_WRITE, vec![]),
        (constants::MLX5_OPCODE_SEND, vec![long]),
        (constants::MLX5_OPCODE_UMR, vec![vec![0xff; 64]]),
        (constants::MLX5_OPCODE_ATOMIC_FA, vec![remote(key, from)]),
    ] {
        let (_, mut cq, mut qp) = loopback(&mut driver);
        driver.send(&mut qp, opcode, 0, &segments);
        let expected = (
            constants::MLX5_CQE_REQ_ERR,
            constants::MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR,
        );
        assert_eq!(ended(&driver.wait(&mut cq)), expected, "opcode {opcode:#x}");
    }
    // The doorbell record has no memory: an event, because no WQE is known to complete with an error.
    let fatal = constants::MLX5_EVENT_TYPE_WQ_CATAS_ERROR;
    let mut events = driver.event_queue(2, &[fatal]);
    let cq = driver.completion_queue(events.number, LOG_ENTRIES, |_| {});
    let lid = driver.lid();
    let mut qp = driver.queue_pair(RC, &cq, |context| ifc::qpc::DBR_ADDR.set(context, 0x1000_u64));
    driver.connect(&qp, lid, qp.number);
    driver.send(&mut qp, constants::MLX5_OPCODE_NOP, 0, &[]);
    let event = until("event", || driver.event(&mut events));
    assert_eq!(wire::eqe::TYPE.get32(&event), fatal);
    let number = wire::eqe::DATA.field(wire::eqe_qp_srq::QP_SRQ_N).get32(&event);
    assert_eq!(number, qp.number);
}

#[test]
fn armed_cq_posts_completion_event() {
    let mut driver = adapter();
    let (mut events, mut cq, mut qp) = loopback(&mut driver);
    let nop = |driver: &mut Driver, qp: &mut driver::Qp| driver.send(qp, constants::MLX5_OPCODE_NOP, 0, &[]);
    nop(&mut driver, &mut qp);
    driver.wait(&mut cq);
    assert_eq!(driver.event(&mut events), None, "a CQ that is not armed posts no event");
    driver.arm_events(&events);
    driver.arm_completions(&cq, 0, false);
    nop(&mut driver, &mut qp);
    let event = until("event", || driver.event(&mut events));
    assert_eq!(wire::eqe::DATA.field(wire::eqe_comp::CQN).get32(&event), cq.number);
    let interrupt = driver.interrupts[1].try_clone().unwrap();
    until("interrupt", || raised(&interrupt).then_some(()));
    // Unread completions that already caused an event cause no second one. Completions after the consumer index of a
    // doorbell cause an event at once, unless the doorbell repeats the arm sequence number.
    driver.arm_completions(&cq, 0, false);
    driver.arm_completions(&cq, 1, false);
    driver.run(op::NOP, 16, 16, |_| {}).unwrap();
    assert_eq!(driver.event(&mut events), None);
    nop(&mut driver, &mut qp);
    until("event", || driver.event(&mut events));
    driver.wait(&mut cq);
    driver.wait(&mut cq);
    nop(&mut driver, &mut qp);
    driver.wait(&mut cq);
    driver.arm_completions(&cq, 1, false);
    driver.run(op::NOP, 16, 16, |_| {}).unwrap();
    assert_eq!(driver.event(&mut events), None);
    cq.next -= 1;
    driver.arm_completions(&cq, 2, false);
    cq.next += 1;
    until("event", || driver.event(&mut events));
    // Solicited only: a send completion causes no event, a receive with the solicited bit does.
    driver.arm_completions(&cq, 3, true);
    nop(&mut driver, &mut qp);
    driver.wait(&mut cq);
    driver.run(op::NOP, 16, 16, |_| {}).unwrap();
    assert_eq!(driver.event(&mut events), None);
    let (key, at) = (driver.key, driver.alloc(4096));
    driver.receive(&mut qp, &[(key, at, 64)]);
    driver.send(&mut qp, constants::MLX5_OPCODE_SEND, 0, &[data((key, at, 1))]);
    until("event", || driver.event(&mut events));
    driver.wait(&mut cq);
    driver.wait(&mut cq);
    // Moderation: an event after three completions.
    driver
        .run(
            op::MODIFY_CQ,
            ifc::modify_cq_in::BYTES,
            ifc::modify_cq_out::BYTES,
            |input| {
                ifc::modify_cq_in::CQN.set(input, cq.number);
                let select = ifc::modify_cq_in::MODIFY_FIELD_SELECT_RESIZE_FIELD_SELECT.of_mut(input);
                let bits = constants::MLX5_CQ_MODIFY_COUNT | constants::MLX5_CQ_MODIFY_PERIOD;
                ifc::modify_field_select::MODIFY_FIELD_SELECT.set(select, bits);
                ifc::cqc::CQ_MAX_COUNT.set(ifc::modify_cq_in::CQ_CONTEXT.of_mut(input), 3_u32);
            },
        )
        .unwrap();
    driver.arm_completions(&cq, 0, false);
    for left in [2, 1, 0] {
        nop(&mut driver, &mut qp);
        driver.wait(&mut cq);
        driver.run(op::NOP, 16, 16, |_| {}).unwrap();
        assert_eq!(driver.event(&mut events).is_some(), left == 0);
    }
}

#[test]
fn cq_overrun_raises_cq_error() {
    let mut driver = adapter();
    let error = constants::MLX5_EVENT_TYPE_CQ_ERROR;
    let mut events = driver.event_queue(1, &[error]);
    let cq = driver.completion_queue(events.number, 2, |_| {});
    let lid = driver.lid();
    let mut qp = driver.queue_pair(RC, &cq, |_| {});
    driver.connect(&qp, lid, qp.number);
    for _ in 0..5 {
        driver.send(&mut qp, constants::MLX5_OPCODE_NOP, 0, &[]);
    }
    let event = until("event", || driver.event(&mut events));
    assert_eq!(wire::eqe::TYPE.get32(&event), error);
    assert_eq!(wire::eqe::DATA.field(wire::eqe_cq_err::CQN).get32(&event), cq.number);
    assert_eq!(wire::eqe::DATA.field(wire::eqe_cq_err::SYNDROME).get32(&event), 1);
    let report = driver.handle.report().unwrap();
    assert_eq!(report.adapter.lost_completions, 1);
    let out = driver.run(op::QUERY_CQ, 16, ifc::query_cq_out::BYTES, |input| {
        ifc::query_cq_in::CQN.set(input, cq.number);
    });
    let out = out.unwrap();
    let context = ifc::query_cq_out::CQ_CONTEXT.of(&out);
    assert_eq!(
        (ifc::cqc::STATUS.get(context), ifc::cqc::PRODUCER_COUNTER.get(context)),
        (9, 4)
    );
    // With `oi` (ignore overrun), new completions overwrite old ones.
    let mut cq = driver.completion_queue(events.number, 2, |context| ifc::cqc::OI.set(context, 1_u32));
    let mut qp = driver.queue_pair(RC, &cq, |_| {});
    driver.connect(&qp, lid, qp.number);
    for _ in 0..3 {
        driver.send(&mut qp, constants::MLX5_OPCODE_NOP, 0, &[]);
        driver.wait(&mut cq);
    }
}

/// Resizes a CQ to `1 << log_entries` entries in `buffer`.
fn resize(driver: &mut Driver, cq: &driver::Ring, log_entries: u32, buffer: u64) -> Result<(), Refused> {
    let entries = 1 << log_entries;
    for i in 0..entries {
        driver.write(buffer + i * 64 + 63, &[0xf1]);
    }
    let done = driver.run(
        op::MODIFY_CQ,
        ifc::modify_cq_in::BYTES + 16,
        ifc::modify_cq_out::BYTES,
        |input| {
            ifc::modify_cq_in::CQN.set(input, cq.number);
            ifc::modify_cq_in::OP_MOD.set(input, constants::MLX5_CQ_OPMOD_RESIZE);
            let select = ifc::modify_cq_in::MODIFY_FIELD_SELECT_RESIZE_FIELD_SELECT.of_mut(input);
            ifc::resize_field_select::RESIZE_FIELD_SELECT.set(select, 7_u32);
            ifc::cqc::LOG_CQ_SIZE.set(ifc::modify_cq_in::CQ_CONTEXT.of_mut(input), log_entries);
            let list = ifc::modify_cq_in::PAS.of_mut(input);
            for (page, at) in (0..(entries * 64).div_ceil(4096)).zip((0..).step_by(8)) {
                list[at..at + 8].copy_from_slice(&(buffer + page * 4096).to_be_bytes());
            }
        },
    );
    done.map(drop)
}

#[test]
fn cq_is_resized() {
    let mut driver = adapter();
    let (_, mut cq, mut qp) = loopback(&mut driver);
    driver.send(&mut qp, constants::MLX5_OPCODE_NOP, 0, &[]);
    driver.wait(&mut cq);
    let buffer = driver.alloc(8192);
    resize(&mut driver, &cq, 7, buffer).unwrap();
    // The last entry in the old buffer is RESIZE_CQ; the next completion is in the new buffer.
    assert_eq!(ended(&driver.wait(&mut cq)).0, constants::MLX5_CQE_RESIZE_CQ);
    driver.send(&mut qp, constants::MLX5_OPCODE_NOP, 0, &[]);
    let entry = until("completion", || {
        let entry = driver.read(buffer + 2 * 64, 64);
        (entry[63] == 0).then_some(entry)
    });
    assert_eq!(wire::cqe64::WQE_COUNTER.get(&entry), 1);
}

#[test]
fn cq_resize_below_content_is_rejected() {
    let mut driver = adapter();
    let lid = driver.lid();
    let events = driver.event_queue(1, &[]);
    let buffer = driver.alloc(4096);
    // Work that is posted before MODIFY_CQ counts, even if the adapter has not fetched it yet.
    for _ in 0..200 {
        let cq = driver.completion_queue(events.number, 3, |_| {});
        let mut qp = driver.queue_pair(RC, &cq, |_| {});
        driver.connect(&qp, lid, qp.number);
        for _ in 0..6 {
            driver.send(&mut qp, constants::MLX5_OPCODE_NOP, 0, &[]);
        }
        let refused = resize(&mut driver, &cq, 2, buffer).unwrap_err();
        assert_eq!(
            refused,
            Refused::Status(constants::MLX5_CMD_STAT_BAD_SIZE_OUTS_CQES_ERR)
        );
    }
    // The RESIZE_CQ entry uses no space in the new buffer: all entries of it are available for completions.
    let cq = driver.completion_queue(events.number, 3, |_| {});
    let mut qp = driver.queue_pair(RC, &cq, |_| {});
    driver.connect(&qp, lid, qp.number);
    resize(&mut driver, &cq, 1, buffer).unwrap();
    resize(&mut driver, &cq, 2, buffer).unwrap();
    for _ in 0..4 {
        driver.send(&mut qp, constants::MLX5_OPCODE_NOP, 0, &[]);
    }
    assert!(
        resize(&mut driver, &cq, 1, buffer).is_err(),
        "resize of a full CQ must fail"
    );
    assert_eq!(driver.handle.report().unwrap().adapter.lost_completions, 0);
}

#[test]
fn datagram_is_delivered() {
    let mut driver = adapter();
    let events = driver.event_queue(1, &[]);
    let mut cq = driver.completion_queue(events.number, LOG_ENTRIES, |_| {});
    let mut qp = driver.queue_pair(UD, &cq, |_| {});
    let lid = driver.lid();
    driver.connect(&qp, lid, 0);
    let (key, at) = (driver.key, driver.alloc(8192));
    driver.write(at, b"datagram");
    driver.receive(&mut qp, &[(key, at + 4096, 100)]);
    let mut vector = vec![0; wire::av::BYTES];
    wire::av::KEY_QKEY_QKEY.set(&mut vector, 0x1234_u32);
    wire::av::DQP_DCT.set(&mut vector, constants::MLX5_EXTENDED_UD_AV | qp.number);
    wire::av::RLID.set(&mut vector, lid);
    let segments = [vector.clone(), data((key, at, 8))];
    driver.send(&mut qp, constants::MLX5_OPCODE_SEND, 0, &segments);
    let mut entries = [driver.wait(&mut cq), driver.wait(&mut cq)];
    entries.sort_by_key(|entry| ended(entry).0);
    assert_eq!(ended(&entries[0]).0, constants::MLX5_CQE_REQ);
    let received = &entries[1];
    assert_eq!(ended(received).0, constants::MLX5_CQE_RESP_SEND);
    assert_eq!(
        wire::cqe64::BYTE_CNT.get(received),
        48,
        "the length includes 40 bytes for the GRH"
    );
    assert_eq!(wire::cqe64::FLAGS_RQPN.get32(received), qp.number);
    assert_eq!(wire::cqe64::SLID.get(received), u64::from(lid));
    assert_eq!(driver.read(at + 4096 + 40, 8), b"datagram");
    let report = driver.handle.report().unwrap();
    assert_eq!((report.payload.host_read, report.payload.host_written), (0, 0));
    assert_eq!(report.datagrams.host_read, 8);
    // Inline header and payload in memory, as UCX retransmits messages.
    let mut header = vec![0; 16];
    wire::wqe_inline_seg::BYTE_COUNT.set(&mut header, constants::MLX5_INLINE_SEG | 6);
    header[wire::wqe_inline_seg::BYTES..][..6].copy_from_slice(b"again ");
    driver.receive(&mut qp, &[(key, at + 4096, 100)]);
    let segments = [vector, header, data((key, at, 8))];
    driver.send(&mut qp, constants::MLX5_OPCODE_SEND, 0, &segments);
    let mut entries = [driver.wait(&mut cq), driver.wait(&mut cq)];
    entries.sort_by_key(|entry| ended(entry).0);
    assert_eq!(ended(&entries[0]).0, constants::MLX5_CQE_REQ);
    assert_eq!(wire::cqe64::BYTE_CNT.get(&entries[1]), 54);
    assert_eq!(driver.read(at + 4096 + 40, 14), b"again datagram");
}

#[test]
fn srq_receives_and_raises_limit_event() {
    let mut driver = adapter();
    let limit = constants::MLX5_EVENT_TYPE_SRQ_RQ_LIMIT;
    let mut events = driver.event_queue(1, &[limit]);
    let mut cq = driver.completion_queue(events.number, LOG_ENTRIES, |_| {});
    let (buffer, record) = (driver.alloc(4096), driver.alloc(4096));
    let (key, pd, at) = (driver.key, driver.pd, driver.alloc(8192));
    // 64 entries of 64 bytes, linked in the order 0, 63, 62, ...
    for i in 0..u64::from(ENTRIES) {
        let mut entry = vec![0; 16];
        let next = (i + u64::from(ENTRIES) - 1) % u64::from(ENTRIES);
        wire::wqe_srq_next_seg::NEXT_WQE_INDEX.set(&mut entry, next);
        entry.extend(data((key, at + 4096 + i * 8, 8)));
        entry.extend(data((0x100, 0, 0)));
        driver.write(buffer + i * 64, &entry);
    }
    driver.write(record, &4_u32.to_be_bytes());
    let out = driver
        .run(
            op::CREATE_SRQ,
            ifc::create_srq_in::BYTES + 8,
            ifc::create_srq_out::BYTES,
            |input| {
                let context = ifc::create_srq_in::SRQ_CONTEXT_ENTRY.of_mut(input);
                ifc::srqc::LOG_SRQ_SIZE.set(context, LOG_ENTRIES);
                ifc::srqc::LOG_RQ_STRIDE.set(context, 2_u32);
                ifc::srqc::PD.set(context, pd);
                ifc::srqc::DBR_ADDR.set(context, record);
                ifc::create_srq_in::PAS
                    .of_mut(input)
                    .copy_from_slice(&buffer.to_be_bytes());
            },
        )
        .unwrap();
    let srqn = ifc::create_srq_out::SRQN.get32(&out);
    driver
        .run(op::ARM_RQ, 16, 16, |input| {
            ifc::arm_rq_in::SRQ_NUMBER.set(input, srqn);
            ifc::arm_rq_in::LWM.set(input, 2_u32);
        })
        .unwrap();
    let mut qp = driver.queue_pair_of_shared(&cq, srqn);
    let lid = driver.lid();
    driver.connect(&qp, lid, qp.number);
    for (n, index) in [0_u64, 63, 62].into_iter().enumerate() {
        assert_eq!(driver.event(&mut events), None);
        driver.write(at, &[n as u8 + 1; 8]);
        driver.send(&mut qp, constants::MLX5_OPCODE_SEND, 0, &[data((key, at, 8))]);
        let mut entries = [driver.wait(&mut cq), driver.wait(&mut cq)];
        entries.sort_by_key(|entry| ended(entry).0);
        let received = &entries[1];
        assert_eq!(ended(received).0, constants::MLX5_CQE_RESP_SEND);
        assert_eq!(wire::cqe64::WQE_COUNTER.get(received), index);
        assert_eq!(wire::cqe64::SRQN.get32(received), srqn);
        assert_eq!(driver.read(at + 4096 + index * 8, 8), [n as u8 + 1; 8]);
    }
    // One receive is left, which is below the limit of two.
    let event = until("event", || driver.event(&mut events));
    assert_eq!(wire::eqe::TYPE.get32(&event), limit);
    let busy = driver.run(op::DESTROY_SRQ, 16, 16, |input| {
        ifc::destroy_srq_in::SRQN.set(input, srqn)
    });
    assert_eq!(busy, Err(Refused::Status(BUSY)));
}

#[test]
fn adapters_exchange_data_and_survive_link_flap() {
    let fabric = fabric();
    let mut a = Driver::new("a", GUID, &fabric);
    let mut b = Driver::new("b", GUID + 16, &fabric);
    a.init();
    b.init();
    let (lid_a, lid_b) = (a.lid(), b.lid());
    assert_ne!(lid_a, lid_b);
    let port = constants::MLX5_EVENT_TYPE_PORT_CHANGE;
    let mut events = a.event_queue(1, &[port]);
    let mut cq_a = a.completion_queue(events.number, LOG_ENTRIES, |_| {});
    let events_b = b.event_queue(1, &[]);
    let cq_b = b.completion_queue(events_b.number, LOG_ENTRIES, |_| {});
    let mut qp_a = a.queue_pair(RC, &cq_a, |_| {});
    let qp_b = b.queue_pair(RC, &cq_b, |_| {});
    a.connect(&qp_a, lid_b, qp_b.number);
    b.connect(&qp_b, lid_a, qp_a.number);
    let bytes = pattern(1 << 20, 9);
    let (from, to) = (a.alloc(1 << 20), b.alloc(1 << 20));
    a.write(from, &bytes);
    let write = [remote(b.key, to), data((a.key, from, 1 << 20))];
    a.send(&mut qp_a, constants::MLX5_OPCODE_RDMA_WRITE, 0, &write);
    assert_eq!(ended(&a.wait(&mut cq_a)).0, constants::MLX5_CQE_REQ);
    assert!(b.read(to, 1 << 20) == bytes);
    assert_eq!(b.handle.report().unwrap().payload.host_written, 1 << 20);
    assert_eq!(a.handle.report().unwrap().payload.host_read, 1 << 20);
    // A link flap: the driver gets two events, and a WRITE that is posted in between completes.
    a.handle.set_link(false).unwrap();
    let event = until("event", || a.event(&mut events));
    let down = constants::MLX5_PORT_CHANGE_SUBTYPE_DOWN;
    assert_eq!(
        (wire::eqe::TYPE.get32(&event), wire::eqe::SUB_TYPE.get32(&event)),
        (port, down)
    );
    a.send(&mut qp_a, constants::MLX5_OPCODE_RDMA_WRITE, 0, &write);
    a.handle.set_link(true).unwrap();
    until("event", || a.event(&mut events));
    assert_eq!(ended(&a.wait(&mut cq_a)).0, constants::MLX5_CQE_REQ);
    // A link with a rate takes its time.
    a.handle.set_rate(NonZeroU64::new(32 << 20)).unwrap();
    let start = Instant::now();
    a.send(&mut qp_a, constants::MLX5_OPCODE_RDMA_WRITE, 0, &write);
    assert_eq!(ended(&a.wait(&mut cq_a)).0, constants::MLX5_CQE_REQ);
    assert!(start.elapsed() >= Duration::from_secs(1) / 32, "{:?}", start.elapsed());
    a.handle.set_rate(None).unwrap();
    a.send(&mut qp_a, constants::MLX5_OPCODE_RDMA_WRITE, 0, &write);
    assert_eq!(ended(&a.wait(&mut cq_a)).0, constants::MLX5_CQE_REQ);
}

#[test]
fn reset_destroys_all_objects() {
    let mut driver = adapter();
    let (_, cq, qp) = loopback(&mut driver);
    for round in 0..3 {
        let before = driver.handle.status().unwrap();
        assert!(before.initialised, "round {round}: adapter not initialised");
        driver.client().reset().unwrap();
        driver.enable_function();
        let after = driver.handle.status().unwrap();
        assert!(!after.initialised && after.queue_pairs == 0 && after.memory_keys == 0);
        // Doorbells of objects that the reset removed.
        let uar = u64::from(driver.uar) * 4096;
        driver
            .client()
            .write(0, uar + 0x800, &[0, 0, 0, 0, 0, 0, 0x40, 1])
            .unwrap();
        driver.arm_completions(&cq, 0, false);
        driver.init();
        let gone = driver.end(op::_2ERR_QP, &qp);
        assert_eq!(gone, Err(Refused::Status(BAD_RESOURCE)));
        let (_, mut cq, mut qp) = loopback(&mut driver);
        driver.send(&mut qp, constants::MLX5_OPCODE_NOP, 0, &[]);
        driver.wait(&mut cq);
    }
    // Teardown as the driver does it.
    driver.run(op::TEARDOWN_HCA, 16, 16, |_| {}).unwrap();
    driver.run(op::DISABLE_HCA, 16, 16, |_| {}).unwrap();
    assert_eq!(driver.handle.status().unwrap().queue_pairs, 0);
    driver.init();
    // After a software reset, the interface is disabled until the driver enables it.
    driver.write_register(0x14, 7 << 8);
    until("reset", || ((driver.register(0x14) >> 8) & 7 == 1).then_some(()));
    assert_eq!(driver.handle.status().unwrap().memory_keys, 0);
    driver.write_register(0x14, RAM as u32);
    driver.init();
}

// SPDX-License-Identifier: MIT OR Apache-2.0

//! The trace of an adapter's steps: a WRITE from its doorbell to its completion, in order.

use p2pmem_mlx5::Point;
use p2pmem_mlx5::layout::constants;

use super::{adapter, loopback, pattern};
use p2pmem_mlx5_driver::{data, ended, remote};

const LEN: usize = 1 << 10;

#[test]
fn a_write_has_every_step_in_order() {
    let mut driver = adapter();
    let (_, mut cq, mut qp) = loopback(&mut driver);
    let (from, to) = (driver.alloc(LEN as u64), driver.alloc(LEN as u64));
    driver.write(from, &pattern(LEN, 1));
    driver.handle.start_trace(100);
    let segments = [remote(driver.key, to), data((driver.key, from, LEN as u32))];
    driver.send(&mut qp, constants::MLX5_OPCODE_RDMA_WRITE, 0, &segments);
    let entry = driver.wait(&mut cq);
    assert_eq!(ended(&entry).0, constants::MLX5_CQE_REQ);
    // The worker answers after it has recorded the completion.
    driver.handle.report().unwrap();
    let trace = driver.handle.take_trace();
    assert_eq!(trace.missed, 0);
    let points: Vec<_> = trace.steps.iter().map(|step| step.point).collect();
    // The queue pair is both ends of its connection: the WRITE and the acknowledgement go through one port.
    use Point::{Complete, Doorbell, Fetch, Read, Receive, Send, Write};
    assert_eq!(
        points,
        [Doorbell, Fetch, Read, Send, Receive, Write, Send, Receive, Complete]
    );
    for step in &trace.steps {
        let payload = matches!(step.point, Read | Write);
        assert_eq!(step.bytes, if payload { LEN as u64 } else { 0 }, "{step:?}");
        assert_eq!(
            step.qpn,
            if matches!(step.point, Send | Receive) {
                0
            } else {
                qp.number
            },
            "{step:?}"
        );
        assert!(step.begin_ns <= step.end_ns, "{step:?}");
    }
    // One worker does all steps after the doorbell, one after the other.
    for pair in trace.steps.windows(2) {
        assert!(pair[0].end_ns <= pair[1].begin_ns, "{pair:?}");
    }
    // The trace has ended.
    driver.send(&mut qp, constants::MLX5_OPCODE_RDMA_WRITE, 0, &segments);
    driver.wait(&mut cq);
    assert!(driver.handle.take_trace().steps.is_empty());
}

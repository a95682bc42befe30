// SPDX-License-Identifier: MIT OR Apache-2.0

//! [`Host`] of the transport engines: work requests, memory access, completions and events.

use std::time::{Duration, Instant};

use p2pmem_ib::{
    Access, Atomic, Completion, Event, Fault, Fetched, Host, Packet, Queue, ReceiveWork, SendWork, Service, Status,
};
use p2pmem_vfio_user::{Dma, DmaError, Extent};
use tracing::{debug, warn};

use super::cqe;
use super::eq::{Eqe, EventType};
use super::layout::constants;
use super::layout::wire::{eqe_page_fault, eqe_qp_srq};
use super::mkey::{Issuer, Mkeys, UmrError};
use super::model::Hca;
use super::wqe::LocalOp;

/// Page fault event: the fault has only one event.
const LAST: u8 = 0x80;
/// Shift of the page count in `demand_fault_pages`.
const PAGES_SHIFT: u32 = 12;

/// Logs a DMA error and returns the fault of the access.
pub(super) fn bus_fault(error: &DmaError) -> Fault {
    debug!(%error, "DMA of payload failed");
    Fault::Bus
}

impl Hca {
    /// Translates an access to bus addresses. Reports a page fault to the driver if a page is not present.
    fn resolve(&mut self, access: &Access) -> Result<Vec<Extent>, Fault> {
        let mut extents = std::mem::take(&mut self.extents);
        extents.clear();
        match self.objects.mkeys.resolve(access, &mut extents) {
            Ok(()) => Ok(extents),
            Err(fault) => {
                self.extents = extents;
                if matches!(fault, Fault::Page(_)) {
                    self.report_page_faults();
                }
                Err(fault)
            }
        }
    }

    fn report_page_faults(&mut self) {
        for fault in self.objects.mkeys.take_faults() {
            self.counters.page_fault();
            self.objects.faults.insert(fault.token);
            let pages = fault.pages.min(u64::from(u32::MAX >> PAGES_SHIFT));
            let entry = Eqe::new(EventType::PAGE_FAULT, constants::MLX5_PFAULT_SUBTYPE_MEMORY)
                .with(eqe_page_fault::MEMORY_FLAGS, LAST)
                .with(eqe_page_fault::MEMORY_TOKEN47_32, fault.token >> 32)
                .with(eqe_page_fault::MEMORY_TOKEN31_0, fault.token & u64::from(u32::MAX))
                .with(eqe_page_fault::MEMORY_DEMAND_FAULT_PAGES, pages << PAGES_SHIFT)
                .with(eqe_page_fault::MEMORY_MKEY, fault.key)
                .with(eqe_page_fault::MEMORY_VA, fault.address);
            self.async_event(EventType::PAGE_FAULT, entry);
        }
    }

    /// Returns the DMA handle that counts the payload of a queue pair.
    fn payload_dma(&self, qpn: u32) -> &Dma {
        let qp = self.objects.qps.get(qpn);
        let datagram = qp.is_some_and(|qp| matches!(qp.service, Service::Ud | Service::Gsi));
        if datagram { &self.datagrams } else { &self.payload }
    }

    /// Translates an access like [`Hca::resolve`], for a transfer that runs while the mkeys may change.
    pub(super) fn begin_transfer(&mut self, access: &Access) -> Result<(u64, Vec<Extent>, Dma), Fault> {
        let mut extents = std::mem::take(&mut self.extents);
        extents.clear();
        match self.objects.mkeys.begin_transfer(access, &mut extents) {
            Ok(transfer) => {
                self.counters.translated(extents.len());
                Ok((transfer, extents, self.payload_dma(access.qpn).clone()))
            }
            Err(fault) => {
                self.extents = extents;
                if matches!(fault, Fault::Page(_)) {
                    self.report_page_faults();
                }
                Err(fault)
            }
        }
    }

    /// Ends a transfer of [`Hca::begin_transfer`].
    pub(super) fn end_transfer(&mut self, transfer: u64, extents: Vec<Extent>) {
        self.objects.mkeys.end_transfer(transfer);
        self.extents = extents;
    }

    fn post_qp_srq_event(&mut self, event: EventType, number: u32) {
        let entry = Eqe::new(event, 0).with(eqe_qp_srq::QP_SRQ_N, number);
        self.async_event(event, entry);
    }

    /// Removes local work request `id` from a queue pair and returns it.
    pub(super) fn take_local(&mut self, qpn: u32, id: u64) -> Result<LocalOp, Status> {
        let local = self.objects.qps.get_mut(qpn).and_then(|qp| qp.take_local(id));
        local.ok_or(Status::LocalQpOperation)
    }

    /// Executes a UMR work request and counts it.
    pub(super) fn change_key(&mut self, qpn: u32, umr: &super::mkey::Umr) -> Result<(), Status> {
        let result = self.umr(qpn, umr);
        self.counters.registration(result.is_ok());
        result.map_err(|error| {
            warn!(name = self.identity.name, qpn, key = format_args!("{:#x}", umr.key), %error, "UMR work request failed");
            Status::MwBind
        })
    }

    /// Executes a UMR work request.
    fn umr(&mut self, qpn: u32, umr: &super::mkey::Umr) -> Result<(), UmrError> {
        let Some(qp) = self.objects.qps.get(qpn) else {
            return Err(UmrError::NoKey);
        };
        let issuer = Issuer {
            pd: qp.pd,
            qpn,
            reg_umr: qp.reg_umr,
        };
        let mut list = Vec::new();
        if let Some(mut access) = umr.list_access(&issuer) {
            // A REG_UMR queue pair may use the mkeys of every protection domain.
            if let Some(pd) = self.objects.mkeys.pd(access.key).filter(|_| qp.reg_umr) {
                access.pd = pd;
            }
            // Not truncated: a 16-bit count of 16-byte units.
            list.resize(access.length as usize, 0);
            let extents = self.resolve(&access).map_err(Mkeys::list_fault)?;
            // A translation list is metadata of the driver, so it is not counted as payload.
            let result = self.dma.read_extents(&extents, &mut list);
            self.extents = extents;
            result.map_err(|error| Mkeys::list_fault(bus_fault(&error)))?;
        }
        self.objects.mkeys.apply(umr, &list, &issuer)
    }
}

impl Host for Hca {
    fn now(&mut self) -> Duration {
        self.started.elapsed()
    }

    fn next_send(&mut self, qpn: u32) -> Fetched<SendWork> {
        match self.objects.qps.get_mut(qpn) {
            Some(qp) => qp.next_send(&self.dma, qpn),
            None => Fetched::Empty,
        }
    }

    fn next_receive(&mut self, queue: Queue) -> Fetched<ReceiveWork> {
        match queue {
            Queue::Own(qpn) => match self.objects.qps.get_mut(qpn) {
                Some(qp) => qp.next_receive(&self.dma),
                None => Fetched::Empty,
            },
            Queue::Shared(srqn) => match self.objects.srqs.get_mut(srqn) {
                Some(srq) => srq.next(&self.dma),
                None => Fetched::Broken,
            },
        }
    }

    fn read(&mut self, access: &Access, data: &mut [u8]) -> Result<(), Fault> {
        let extents = self.resolve(access)?;
        let result = self.payload_dma(access.qpn).read_extents(&extents, data);
        self.extents = extents;
        result.map_err(|error| bus_fault(&error))
    }

    fn write(&mut self, access: &Access, data: &[u8]) -> Result<(), Fault> {
        let extents = self.resolve(access)?;
        let result = self.payload_dma(access.qpn).write_extents(&extents, data);
        self.extents = extents;
        result.map_err(|error| bus_fault(&error))
    }

    fn check(&mut self, access: &Access) -> Result<(), Fault> {
        self.objects.mkeys.check(access)
    }

    fn atomic(&mut self, access: &Access, operation: Atomic) -> Result<u64, Fault> {
        let extents = self.resolve(access)?;
        let [extent] = extents[..] else {
            self.extents = extents;
            return Err(Fault::Bounds);
        };
        self.extents = extents;
        let host_order = self.objects.caps.atomics_in_host_order();
        // `update` returns values in the byte order of this CPU. The driver selected either this order or big-endian.
        let order = |value: u64| if host_order { value } else { value.swap_bytes() };
        let change = |value: u64| {
            let old = order(value);
            order(match operation {
                Atomic::CompareSwap { compare, swap } if old == compare => swap,
                Atomic::CompareSwap { .. } => old,
                Atomic::FetchAdd { add } => old.wrapping_add(add),
            })
        };
        let old = self.payload_dma(access.qpn).update(extent.address, change);
        old.map(order).map_err(|error| bus_fault(&error))
    }

    fn atomic_result(&mut self, _qpn: u32, original: u64) -> [u8; 8] {
        if self.objects.caps.atomics_in_host_order() {
            original.to_ne_bytes()
        } else {
            original.to_be_bytes()
        }
    }

    fn local(&mut self, qpn: u32, id: u64) -> Result<(), Status> {
        match self.take_local(qpn, id)? {
            LocalOp::Nop => Ok(()),
            LocalOp::Umr(umr) => self.change_key(qpn, &umr),
        }
    }

    fn invalidate(&mut self, qpn: u32, pd: u32, key: u32) -> Result<(), Fault> {
        self.objects.mkeys.invalidate(key, pd, qpn)
    }

    fn complete(&mut self, completion: Completion) {
        let cqn = match completion {
            Completion::Send { cqn, .. } | Completion::Receive { cqn, .. } => cqn,
        };
        let pkeys = &self.attributes.pkeys;
        let pkey = |index: u16| pkeys.get(usize::from(index)).copied().unwrap_or(0);
        let entry = cqe::encode(&completion, pkey, self.registers.clock());
        let solicited = cqe::solicited(&completion);
        self.counters.completion();
        if let Some(cq) = self.objects.cqs.get_mut(cqn) {
            let posted = cq.post(&self.dma, entry, solicited, Instant::now());
            self.handle_post_result(cqn, posted);
        }
    }

    fn event(&mut self, event: Event) {
        let (event, number) = match event {
            Event::CommunicationEstablished { qpn } => (EventType::COMMUNICATION_ESTABLISHED, qpn),
            Event::QpFatal { qpn } => (EventType::QP_FATAL, qpn),
            Event::InvalidRequest { qpn } => (EventType::INVALID_REQUEST, qpn),
            Event::AccessViolation { qpn } => (EventType::ACCESS_VIOLATION, qpn),
            Event::SendQueueDrained { qpn } => (EventType::SEND_QUEUE_DRAINED, qpn),
            Event::LastWorkReached { qpn } => (EventType::LAST_WORK, qpn),
            Event::SrqLimit { srqn } => (EventType::SRQ_LIMIT, srqn),
            Event::SrqError { srqn } => {
                if let Some(srq) = self.objects.srqs.get_mut(srqn) {
                    srq.broken = true;
                }
                (EventType::SRQ_ERROR, srqn)
            }
        };
        self.post_qp_srq_event(event, number);
    }

    fn transmit(&mut self, packets: Vec<Packet>) {
        self.port.send(packets);
    }

    fn has_space(&mut self, dlid: u16) -> bool {
        self.port.has_space(dlid)
    }

    fn in_flight(&mut self, dlid: u16) -> bool {
        self.port.in_flight(dlid)
    }
}

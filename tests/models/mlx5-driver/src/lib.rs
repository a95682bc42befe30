// SPDX-License-Identifier: MIT OR Apache-2.0

//! A minimal driver of the ConnectX model without a kernel: shared memory, commands, queues, doorbells.
//!
//! All functions panic if the adapter does not answer within two minutes.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use p2pmem_ib::Fabric;
use p2pmem_mlx5::layout::{Field, constants, ifc, op, wire};
use p2pmem_mlx5::{Handle, Nic, Settings};
use p2pmem_vfio_user::client::Client;
use p2pmem_vfio_user::proto::CONFIG_REGION;
use p2pmem_vfio_user::{Bus, LinkSpeed, Memory, serve};
use rustix::event::{EventfdFlags, eventfd};

/// Bus address of the shared memory.
pub const RAM: u64 = 0x1_0000_0000;
const RAM_SIZE: u64 = 64 << 20;
const TIMEOUT: Duration = Duration::from_secs(120);
const PAGE: u64 = 4096;
const QUEUE: u64 = RAM;
const TOKEN: u8 = 0x5a;
/// Number of entries of most queues.
pub const LOG_ENTRIES: u32 = 6;
/// See [`LOG_ENTRIES`].
pub const ENTRIES: u32 = 1 << LOG_ENTRIES;
const CQE: u64 = wire::cqe64::BYTES as u64;
const EQE: u64 = wire::eqe::BYTES as u64;

/// Reason why a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Delivery status: the adapter did not execute the command.
    Delivery(u8),
    /// Status in the output.
    Status(u32),
}

/// An adapter and its driver.
pub struct Driver {
    client: Option<Client>,
    server: Option<JoinHandle<bool>>,
    /// Observes the adapter from outside.
    pub handle: Handle,
    /// The shared memory, at the bus address [`RAM`].
    pub ram: Arc<Memory>,
    free: u64,
    /// Event files of the interrupt vectors.
    pub interrupts: Vec<OwnedFd>,
    /// Index of the UAR, a page of BAR0.
    pub uar: u32,
    /// Number of the protection domain.
    pub pd: u32,
    /// An mkey of all memory, in access mode PA.
    pub key: u32,
}

/// Driver's side of an EQ or CQ.
#[derive(Clone, Debug)]
pub struct Ring {
    /// Number of the queue.
    pub number: u32,
    /// Address of the entries.
    pub buffer: u64,
    log_entries: u32,
    /// Index of the next entry.
    pub next: u32,
    /// Address of the doorbell record; 0 for an EQ.
    pub record: u64,
}

/// Driver's side of a QP.
#[derive(Clone, Debug)]
pub struct Qp {
    /// Number of the QP.
    pub number: u32,
    /// Address of the queues.
    pub buffer: u64,
    /// Address of the send queue: after the receive queue, if the QP has one.
    pub send_buffer: u64,
    /// Address of the doorbell record.
    pub record: u64,
    sent: u32,
    received: u32,
}

/// Polls `look` until it returns a value. Panics after [`TIMEOUT`].
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "timeout: no {what} within {TIMEOUT:?}");
        std::thread::yield_now();
    }
}

impl Driver {
    /// Creates an adapter in a subnet and enables the PCI function.
    pub fn new(name: &str, guid: u64, fabric: &Fabric) -> Self {
        let settings = Settings {
            name: name.to_owned(),
            guid,
            switch: "sw".to_owned(),
            bytes_per_second: None,
            speed: LinkSpeed::Gen4,
            lanes: 16,
        };
        let mut nic = Nic::new(settings, fabric, Bus::new(16)).unwrap();
        let handle = nic.handle();
        let (theirs, ours) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || serve(ours, &mut nic).is_ok());
        let mut client = Client::new(theirs).unwrap();
        client.version().unwrap();
        let ram = Arc::new(Memory::new("ram", RAM_SIZE).unwrap());
        client.dma_map(RAM, RAM_SIZE, Some((ram.fd(), 0))).unwrap();
        let mut driver = Self {
            client: Some(client),
            server: Some(server),
            handle,
            ram,
            free: RAM + 0x10_0000,
            interrupts: Vec::new(),
            uar: 0,
            pd: 0,
            key: 0,
        };
        driver.enable_function();
        driver
    }

    /// Enables the PCI function and sets the command queue. Necessary after each reset.
    pub fn enable_function(&mut self) {
        // Enable memory space and bus mastering, then MSI-X.
        self.client().write(CONFIG_REGION, 4, &[6, 0]).unwrap();
        let mut config = [0; 256];
        self.client().read(CONFIG_REGION, 0, &mut config).unwrap();
        let mut at = usize::from(config[0x34]);
        while config[at] != 0x11 {
            at = usize::from(config[at + 1]);
        }
        self.client().write(CONFIG_REGION, at as u64 + 2, &[0, 0x80]).unwrap();
        self.interrupts = (0..16).map(|_| eventfd(0, EventfdFlags::NONBLOCK).unwrap()).collect();
        let fds: Vec<OwnedFd> = self.interrupts.iter().map(|fd| fd.try_clone().unwrap()).collect();
        self.client().arm(0, &fds).unwrap();
        until("end of the initialisation", || {
            (self.register(0x1fc) >> 31 == 0).then_some(())
        });
        self.write_register(0x10, (QUEUE >> 32) as u32);
        self.write_register(0x14, QUEUE as u32);
    }

    /// The connection to the adapter, in place of QEMU.
    pub fn client(&mut self) -> &mut Client {
        self.client.as_mut().unwrap()
    }

    /// Reads a register.
    pub fn register(&mut self, offset: u64) -> u32 {
        self.client().read32(0, offset).unwrap().swap_bytes()
    }

    /// Writes a register.
    pub fn write_register(&mut self, offset: u64, value: u32) {
        self.client().write(0, offset, &value.to_be_bytes()).unwrap();
    }

    /// Reads shared memory at a bus address.
    pub fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.ram.read(address - RAM, &mut data).unwrap();
        data
    }

    /// Writes shared memory at a bus address.
    pub fn write(&self, address: u64, data: &[u8]) {
        self.ram.write(address - RAM, data).unwrap();
    }

    /// Allocates zeroed memory of whole pages.
    pub fn alloc(&mut self, len: u64) -> u64 {
        let address = self.free;
        self.free += len.next_multiple_of(PAGE);
        assert!(self.free <= RAM + RAM_SIZE);
        address
    }

    /// Writes a command to entry `slot` and rings the doorbell.
    pub fn submit(&mut self, slot: u32, input: &[u8], output_len: usize) {
        let area = QUEUE + 0x1000 + u64::from(slot) * 0x8000;
        let block = wire::cmd_prot_block::BYTES;
        let chain = |start: u64, len: usize, data: &[u8]| {
            let blocks = len.saturating_sub(16).div_ceil(512);
            for i in 0..blocks {
                let mut bytes = vec![0; block];
                let part = data.get(16 + i * 512..).unwrap_or(&[]);
                let part = &part[..part.len().min(512)];
                bytes[..part.len()].copy_from_slice(part);
                let at = start + i as u64 * 0x400;
                let next = if i + 1 < blocks { at + 0x400 } else { 0 };
                wire::cmd_prot_block::NEXT.set(&mut bytes, next);
                wire::cmd_prot_block::BLOCK_NUM.set(&mut bytes, i as u64);
                wire::cmd_prot_block::TOKEN.set(&mut bytes, TOKEN);
                self.write(at, &bytes);
            }
            if blocks > 0 { start } else { 0 }
        };
        let input_chain = chain(area, input.len(), input);
        let output_chain = chain(area + 0x4000, output_len, &[]);
        let mut entry = [0; wire::cmd_layout::BYTES];
        wire::cmd_layout::TYPE.set(&mut entry, constants::MLX5_PCI_CMD_XPORT);
        wire::cmd_layout::INLEN.set(&mut entry, input.len() as u64);
        wire::cmd_layout::OUTLEN.set(&mut entry, output_len as u64);
        wire::cmd_layout::IN_PTR.set(&mut entry, input_chain);
        wire::cmd_layout::OUT_PTR.set(&mut entry, output_chain);
        wire::cmd_layout::TOKEN.set(&mut entry, TOKEN);
        wire::cmd_layout::STATUS_OWN.set(&mut entry, 1_u32);
        let head = input.len().min(16);
        wire::cmd_layout::IN.of_mut(&mut entry)[..head].copy_from_slice(&input[..head]);
        self.write(QUEUE + u64::from(slot) * 64, &entry);
        self.write_register(0x18, 1 << slot);
    }

    /// Waits for a command and returns its output.
    pub fn answer(&mut self, slot: u32, output_len: usize) -> Result<Vec<u8>, Refused> {
        let entry = QUEUE + u64::from(slot) * 64;
        let own = until("command completion", || {
            let own = self.read(entry + 63, 1)[0];
            (own & 1 == 0).then_some(own)
        });
        if own != 0 {
            return Err(Refused::Delivery(own >> 1));
        }
        let mut output = self.read(entry + 32, 16);
        let area = QUEUE + 0x1000 + u64::from(slot) * 0x8000 + 0x4000;
        for i in 0..output_len.saturating_sub(16).div_ceil(512) {
            output.extend(self.read(area + i as u64 * 0x400, 512));
        }
        output.truncate(output_len);
        match ifc::nop_out::STATUS.get32(&output) {
            0 => Ok(output),
            status => Err(Refused::Status(status)),
        }
    }

    /// Submits a command and waits for its output.
    pub fn command(&mut self, input: &[u8], output_len: usize) -> Result<Vec<u8>, Refused> {
        self.submit(0, input, output_len);
        self.answer(0, output_len)
    }

    /// Executes a command of `len` bytes whose input `fill` sets.
    pub fn run(
        &mut self,
        opcode: u16,
        len: usize,
        output_len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Vec<u8>, Refused> {
        let mut input = vec![0; len];
        ifc::nop_in::OPCODE.set(&mut input, opcode);
        fill(&mut input);
        self.command(&input, output_len)
    }

    /// Initialises the adapter after a reset: the HCA, a UAR, a protection domain and an mkey.
    pub fn init(&mut self) {
        use ifc::*;
        self.run(op::ENABLE_HCA, enable_hca_in::BYTES, enable_hca_out::BYTES, |_| {})
            .unwrap();
        self.run(op::INIT_HCA, init_hca_in::BYTES, init_hca_out::BYTES, |_| {})
            .unwrap();
        let out = self.run(op::ALLOC_UAR, alloc_uar_in::BYTES, alloc_uar_out::BYTES, |_| {});
        self.uar = alloc_uar_out::UAR.get32(&out.unwrap());
        let out = self.run(op::ALLOC_PD, alloc_pd_in::BYTES, alloc_pd_out::BYTES, |_| {});
        self.pd = alloc_pd_out::PD.get32(&out.unwrap());
        self.key = self.physical_key(self.pd);
    }

    /// Returns the LID of the port, which must be active.
    pub fn lid(&mut self) -> u16 {
        use ifc::*;
        let (input, output) = (query_hca_vport_context_in::BYTES, query_hca_vport_context_out::BYTES);
        let out = self.run(op::QUERY_HCA_VPORT_CONTEXT, input, output, |_| {}).unwrap();
        let context = query_hca_vport_context_out::HCA_VPORT_CONTEXT.of(&out);
        assert_eq!(
            hca_vport_context::VPORT_STATE.get(context),
            4,
            "the port must be active"
        );
        hca_vport_context::LID.get(context) as u16
    }

    /// Creates an mkey of all memory with all rights.
    pub fn physical_key(&mut self, pd: u32) -> u32 {
        use ifc::mkc;
        self.physical_key_with(pd, &[mkc::LR, mkc::LW, mkc::RR, mkc::RW, mkc::A], 0x77)
    }

    /// Creates an mkey of all memory with these context bits and this variant.
    pub fn physical_key_with(&mut self, pd: u32, bits: &[Field], variant: u32) -> u32 {
        use ifc::*;
        let out = self.run(
            op::CREATE_MKEY,
            create_mkey_in::BYTES,
            create_mkey_out::BYTES,
            |input| {
                let context = create_mkey_in::MEMORY_KEY_MKEY_ENTRY.of_mut(input);
                mkc::ACCESS_MODE_1_0.set(context, constants::MLX5_MKC_ACCESS_MODE_PA);
                for bit in bits.iter().chain(&[mkc::LENGTH64]) {
                    bit.set(context, 1_u32);
                }
                mkc::PD.set(context, pd);
                mkc::QPN.set(context, 0xff_ffff_u32);
                mkc::MKEY_7_0.set(context, variant);
            },
        );
        (create_mkey_out::MKEY_INDEX.get32(&out.unwrap()) << 8) | variant
    }

    /// Creates an EQ for these event types on an interrupt vector.
    pub fn event_queue(&mut self, vector: u32, types: &[u32]) -> Ring {
        use ifc::*;
        let bytes = u64::from(ENTRIES) * EQE;
        let buffer = self.alloc(bytes);
        for i in 0..u64::from(ENTRIES) {
            self.write(buffer + i * EQE + 63, &[1]);
        }
        let uar = self.uar;
        let len = create_eq_in::BYTES + 8 * bytes.div_ceil(PAGE) as usize;
        let out = self.run(op::CREATE_EQ, len, create_eq_out::BYTES, |input| {
            let context = create_eq_in::EQ_CONTEXT_ENTRY.of_mut(input);
            eqc::LOG_EQ_SIZE.set(context, LOG_ENTRIES);
            eqc::UAR_PAGE.set(context, uar);
            eqc::INTR.set(context, vector);
            let mask = types.iter().fold(0_u64, |mask, event| mask | (1 << event));
            create_eq_in::EVENT_BITMASK.at(0).set(input, mask);
            pages(create_eq_in::PAS.of_mut(input), buffer, bytes);
        });
        let number = create_eq_out::EQ_NUMBER.get32(&out.unwrap());
        Ring {
            number,
            buffer,
            log_entries: LOG_ENTRIES,
            next: 0,
            record: 0,
        }
    }

    /// Rings the EQ doorbell with the consumer index, and arms the EQ.
    pub fn arm_events(&mut self, ring: &Ring) {
        let offset = u64::from(self.uar) * 4096 + 0x40;
        self.write_register(offset, (ring.number << 24) | ring.next & 0xff_ffff);
    }

    /// Returns the next event, if any.
    pub fn event(&self, ring: &mut Ring) -> Option<Vec<u8>> {
        self.entry(ring, EQE)
    }

    fn entry(&self, ring: &mut Ring, size: u64) -> Option<Vec<u8>> {
        let index = u64::from(ring.next & ((1 << ring.log_entries) - 1));
        let entry = self.read(ring.buffer + index * size, size as usize);
        let owner = (ring.next >> ring.log_entries) & 1;
        // An entry that was never written has the owner bit of the driver, or an invalid opcode.
        if u32::from(entry[63] & 1) != owner || entry[63] >> 4 == 0xf {
            return None;
        }
        ring.next += 1;
        Some(entry)
    }

    /// Creates a CQ of `2^log_entries` entries.
    pub fn completion_queue(&mut self, eqn: u32, log_entries: u32, fill: impl FnOnce(&mut [u8])) -> Ring {
        use ifc::*;
        let bytes = CQE << log_entries;
        let buffer = self.alloc(bytes);
        for i in 0..1_u64 << log_entries {
            self.write(buffer + i * CQE + 63, &[0xf1]);
        }
        let record = self.alloc(PAGE);
        let uar = self.uar;
        let len = create_cq_in::BYTES + 8 * bytes.div_ceil(PAGE) as usize;
        let out = self.run(op::CREATE_CQ, len, create_cq_out::BYTES, |input| {
            let context = create_cq_in::CQ_CONTEXT.of_mut(input);
            cqc::LOG_CQ_SIZE.set(context, log_entries);
            cqc::UAR_PAGE.set(context, uar);
            cqc::C_EQN_OR_APU_ELEMENT.set(context, eqn);
            cqc::DBR_ADDR.set(context, record);
            fill(context);
            pages(create_cq_in::PAS.of_mut(input), buffer, bytes);
        });
        let number = create_cq_out::CQN.get32(&out.unwrap());
        Ring {
            number,
            buffer,
            log_entries,
            next: 0,
            record,
        }
    }

    /// Arms a CQ with this arm sequence number, for all or only for solicited completions.
    pub fn arm_completions(&mut self, ring: &Ring, sequence: u32, solicited: bool) {
        let word = (sequence << 28) | (u32::from(solicited) << 24) | ring.next & 0xff_ffff;
        let mut data = word.to_be_bytes().to_vec();
        data.extend(ring.number.to_be_bytes());
        let offset = u64::from(self.uar) * 4096 + 0x20;
        self.client().write(0, offset, &data).unwrap();
    }

    /// Returns the next completion, if any, and updates the doorbell record.
    pub fn completion(&self, ring: &mut Ring) -> Option<Vec<u8>> {
        let entry = self.entry(ring, CQE)?;
        self.write(ring.record, &(ring.next & 0xff_ffff).to_be_bytes());
        Some(entry)
    }

    /// Waits for the next completion.
    pub fn wait(&self, ring: &mut Ring) -> Vec<u8> {
        until("completion", || self.completion(ring))
    }

    /// Creates a QP in state RST with one CQ for both queues.
    pub fn queue_pair(&mut self, service: u32, cq: &Ring, fill: impl FnOnce(&mut [u8])) -> Qp {
        self.try_queue_pair(service, cq, fill).unwrap()
    }

    /// Creates a QP in state RST with a CQ for each queue.
    pub fn queue_pair_with(&mut self, service: u32, sends: &Ring, receives: &Ring) -> Qp {
        let receives = receives.number;
        self.queue_pair(service, sends, |context| ifc::qpc::CQN_RCV.set(context, receives))
    }

    /// Creates a QP like [`Driver::queue_pair`]. The command may fail.
    pub fn try_queue_pair(&mut self, service: u32, cq: &Ring, fill: impl FnOnce(&mut [u8])) -> Result<Qp, Refused> {
        use ifc::*;
        // Receive WQEs of 64 bytes, then send WQEs of 64 bytes.
        let bytes = 2 * 64 * u64::from(ENTRIES);
        let buffer = self.alloc(bytes);
        let record = self.alloc(PAGE);
        let (uar, pd) = (self.uar, self.pd);
        let len = create_qp_in::BYTES + 8 * bytes.div_ceil(PAGE) as usize;
        let out = self.run(op::CREATE_QP, len, create_qp_out::BYTES, |input| {
            let context = create_qp_in::QPC.of_mut(input);
            qpc::ST.set(context, service);
            qpc::PD.set(context, pd);
            qpc::UAR_PAGE.set(context, uar);
            qpc::CQN_SND.set(context, cq.number);
            qpc::CQN_RCV.set(context, cq.number);
            qpc::LOG_SQ_SIZE.set(context, LOG_ENTRIES);
            qpc::LOG_RQ_SIZE.set(context, LOG_ENTRIES);
            qpc::LOG_RQ_STRIDE.set(context, 2_u32);
            qpc::DBR_ADDR.set(context, record);
            fill(context);
            pages(create_qp_in::PAS.of_mut(input), buffer, bytes);
        })?;
        Ok(Qp {
            number: create_qp_out::QPN.get32(&out),
            buffer,
            send_buffer: buffer + 64 * u64::from(ENTRIES),
            record,
            sent: 0,
            received: 0,
        })
    }

    /// Creates an RC QP with an SRQ.
    pub fn queue_pair_of_shared(&mut self, cq: &Ring, srqn: u32) -> Qp {
        let mut qp = self.queue_pair(constants::MLX5_QP_ST_RC, cq, |context| {
            ifc::qpc::RQ_TYPE.set(context, constants::MLX5_SRQ_RQ);
            ifc::qpc::SRQN_RMPN_XRQN.set(context, srqn);
        });
        qp.send_buffer = qp.buffer;
        qp
    }

    /// Executes a QP transition.
    pub fn modify(&mut self, opcode: u16, qp: &Qp, options: u32, fill: impl FnOnce(&mut [u8])) -> Result<(), Refused> {
        use ifc::*;
        self.run(opcode, rst2init_qp_in::BYTES, rst2init_qp_out::BYTES, |input| {
            rst2init_qp_in::QPN.set(input, qp.number);
            rst2init_qp_in::OPT_PARAM_MASK.set(input, options);
            fill(rst2init_qp_in::QPC.of_mut(input));
        })
        .map(drop)
    }

    /// Connects a QP: all remote rights, both packet sequence numbers 7.
    pub fn connect(&mut self, qp: &Qp, lid: u16, remote: u32) {
        use ifc::*;
        self.modify(op::RST2INIT_QP, qp, 0, |context| {
            for right in [qpc::RRE, qpc::RWE, qpc::RAE] {
                right.set(context, 1_u32);
            }
            qpc::Q_KEY.set(context, 0x1234_u32);
        })
        .unwrap();
        self.modify(op::INIT2RTR_QP, qp, 0, |context| {
            qpc::MTU.set(context, 3_u32);
            qpc::LOG_MSG_MAX.set(context, 30_u32);
            qpc::REMOTE_QPN.set(context, remote);
            qpc::NEXT_RCV_PSN.set(context, 7_u32);
            qpc::LOG_RRA_MAX.set(context, 2_u32);
            qpc::MIN_RNR_NAK.set(context, 1_u32);
            ads::RLID.set(qpc::PRIMARY_ADDRESS_PATH.of_mut(context), lid);
        })
        .unwrap();
        self.modify(op::RTR2RTS_QP, qp, 0, |context| {
            qpc::NEXT_SEND_PSN.set(context, 7_u32);
            qpc::LOG_SRA_MAX.set(context, 2_u32);
            qpc::RETRY_COUNT.set(context, 7_u32);
            qpc::RNR_RETRY.set(context, 7_u32);
            ads::ACK_TIMEOUT.set(qpc::PRIMARY_ADDRESS_PATH.of_mut(context), 14_u32);
        })
        .unwrap();
    }

    /// Executes 2ERR_QP or 2RST_QP.
    pub fn end(&mut self, opcode: u16, qp: &Qp) -> Result<(), Refused> {
        self.run(opcode, ifc::qp_2err_in::BYTES, ifc::qp_2err_out::BYTES, |input| {
            ifc::qp_2err_in::QPN.set(input, qp.number);
        })
        .map(drop)
    }

    /// Posts a receive WQE.
    pub fn receive(&self, qp: &mut Qp, sges: &[(u32, u64, u32)]) {
        let at = qp.buffer + u64::from(qp.received % ENTRIES) * 64;
        let mut entry = Vec::new();
        for sge in sges {
            entry.extend(data(*sge));
        }
        if entry.len() < 64 {
            entry.extend(data((0x100, 0, 0)));
        }
        self.write(at, &entry);
        qp.received += 1;
        self.write(qp.record, &(qp.received & 0xffff).to_be_bytes());
    }

    /// Posts a send WQE with these segments after the control segment. Requests a completion, and a solicited event on
    /// the remote side.
    pub fn send(&mut self, qp: &mut Qp, opcode: u32, immediate: u32, segments: &[Vec<u8>]) {
        let len = 16 + segments.iter().map(Vec::len).sum::<usize>();
        let mut entry = vec![0; 16];
        use wire::wqe_ctrl_seg as seg;
        seg::OPMOD_IDX_OPCODE.set(&mut entry, ((qp.sent & 0xffff) << 8) | opcode);
        seg::QPN_DS.set(&mut entry, (qp.number << 8) | (len as u32 / 16));
        let flags = constants::MLX5_WQE_CTRL_CQ_UPDATE | constants::MLX5_WQE_CTRL_SOLICITED;
        seg::FM_CE_SE.set(&mut entry, flags);
        seg::IMM.set(&mut entry, immediate);
        for segment in segments {
            entry.extend(segment);
        }
        let start = qp.send_buffer;
        for (i, block) in entry.chunks(64).enumerate() {
            let index = (qp.sent + i as u32) % ENTRIES;
            self.write(start + u64::from(index) * 64, block);
        }
        qp.sent += len.div_ceil(64) as u32;
        self.write(qp.record + 4, &(qp.sent & 0xffff).to_be_bytes());
        let offset = u64::from(self.uar) * 4096 + 0x800;
        let head = entry[..8].to_vec();
        self.client().write(0, offset, &head).unwrap();
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.client = None;
        let good = self.server.take().unwrap().join();
        assert!(std::thread::panicking() || good.unwrap(), "`serve` failed");
    }
}

/// Writes the page list of a buffer.
fn pages(list: &mut [u8], buffer: u64, bytes: u64) {
    for (i, page) in list.chunks_exact_mut(8).enumerate().take(bytes.div_ceil(PAGE) as usize) {
        page.copy_from_slice(&(buffer + i as u64 * PAGE).to_be_bytes());
    }
}

/// Builds a data segment.
pub fn data((key, address, len): (u32, u64, u32)) -> Vec<u8> {
    let mut segment = vec![0; 16];
    wire::wqe_data_seg::BYTE_COUNT.set(&mut segment, len);
    wire::wqe_data_seg::LKEY.set(&mut segment, key);
    wire::wqe_data_seg::ADDR.set(&mut segment, address);
    segment
}

/// Builds a remote address segment.
pub fn remote(key: u32, address: u64) -> Vec<u8> {
    let mut segment = vec![0; 16];
    wire::wqe_raddr_seg::RADDR.set(&mut segment, address);
    wire::wqe_raddr_seg::RKEY.set(&mut segment, key);
    segment
}

/// Returns the opcode of a CQE, and the syndrome of an error CQE.
pub fn ended(entry: &[u8]) -> (u32, u32) {
    (u32::from(entry[63] >> 4), wire::err_cqe::SYNDROME.get32(entry))
}

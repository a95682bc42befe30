// SPDX-License-Identifier: GPL-2.0

//! The orchestrator: knows all providers, chooses among them, and ends what has to end.

use crate::{
    buffer::{Buffer, Holder, State},
    chardev::File,
    decision::{Account, Decided},
    dmabuf::Patience,
    ext::{
        bus,
        driver,
        log::{self, capable_admin},
        p2pdma::{self, Backing},
        pci::Function,
        trace,
        uapi::{self, consts},
        vma::AddressSpace, //
    },
    path::{Path, PathClass, PciAddr},
    peer_client::Peers,
    placement::{self, Candidate, Named, Strategy, Verdict},
    provider::{Counters, Kind, Leave, Parts, Provider},
    refusal::{refuse, Answer},
    rules::{breaks, Book, Judge, Rules, Uncharged},
    topology::{Cache, Walk},
};
use kernel::{
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    rbtree::RBTreeNode,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
};

const PAGE: u64 = PAGE_SIZE as u64;

/// What is asked for, with all fields checked.
pub(crate) struct Wish {
    pub(crate) size: u64,
    pub(crate) align: u64,
    pub(crate) clients: KVec<Function>,
    pub(crate) named: Named,
    pub(crate) strategy: u32,
    pub(crate) max_class: Option<PathClass>,
    /// The rules of the file itself.
    pub(crate) own: Option<Arc<Book>>,
}

/// What the administrator wants published.
#[derive(Clone, Copy)]
pub(crate) struct Publication {
    pub(crate) addr: PciAddr,
    /// None: the largest prefetchable 64-bit one.
    pub(crate) bar: Option<u32>,
    pub(crate) offset: u64,
    /// 0: all from `offset` on.
    pub(crate) size: u64,
    /// None: a sixteenth, 16 MiB at most; without pages nothing.
    pub(crate) kernel_reserve: Option<u64>,
    /// Whether it gets struct pages.
    pub(crate) pages: bool,
    /// Whether it may be exported to importers that cannot be revoked.
    pub(crate) pinned_exports: bool,
}

struct Registry {
    providers: KVec<Arc<Provider>>,
    next_id: u32,
    cache: Cache,
}

/// What the module knows.
#[pin_data]
pub(crate) struct Orchestrator {
    space: AddressSpace<Buffer>,
    rules: Arc<Rules>,
    /// Changes whenever a path may have become another one.
    generation: Atomic<u64>,
    next_file: Atomic<u64>,
    /// Counters of providers that left.
    past: Counters,
    #[pin]
    registry: Mutex<Registry>,
    #[pin]
    files: Mutex<KVec<Arc<File>>>,
    #[pin]
    peers: Peers,
}

impl Orchestrator {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let space = AddressSpace::new()?;
        let rules = Rules::new()?;
        Arc::pin_init(
            pin_init!(Self {
                space,
                rules,
                generation: Atomic::new(1),
                next_file: Atomic::new(1),
                past: Counters::new(),
                registry <- new_mutex!(Registry {
                    providers: KVec::new(),
                    next_id: 1,
                    cache: Cache::new(),
                }),
                files <- new_mutex!(KVec::new()),
                peers <- Peers::new(),
            }),
            GFP_KERNEL,
        )
    }

    pub(crate) fn space(&self) -> &AddressSpace<Buffer> {
        &self.space
    }

    /// What RDMA adapters have registered by way of mappings.
    pub(crate) fn peers(&self) -> &Peers {
        &self.peers
    }

    pub(crate) fn rules(&self) -> &Arc<Rules> {
        &self.rules
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// A number for a file that is being opened.
    pub(crate) fn file_id(&self) -> u64 {
        self.next_file.fetch_add(1, Relaxed)
    }

    pub(crate) fn add_file(&self, file: &Arc<File>) -> Result {
        Ok(self.files.lock().push(file.clone(), GFP_KERNEL)?)
    }

    /// An open file.
    pub(crate) fn file(&self, id: u64) -> Option<Arc<File>> {
        self.files.lock().iter().find(|f| f.id == id).cloned()
    }

    pub(crate) fn remove_file(&self, id: u64) {
        let mut removed = None;
        let mut files = self.files.lock();
        if let Some(at) = files.iter().position(|f| f.id == id) {
            removed = files.remove(at).ok();
        }
        drop(files);
        // Outside the lock: the last reference of a file ends its buffers.
        drop(removed);
    }

    /// Tells all files, or the one that `handle` says a buffer of.
    fn tell(&self, kind: u32, provider: u32, buffer: Option<&Buffer>) {
        for file in self.files.lock().iter() {
            match buffer {
                None => file.tell(kind, provider, 0),
                Some(buffer) if buffer.file == file.id => {
                    file.tell(kind, provider, file.handle_of(buffer).unwrap_or(0));
                }
                Some(_) => {}
            }
        }
    }

    /// All providers there are now, in the order of their numbers.
    pub(crate) fn providers(&self) -> Result<KVec<Arc<Provider>>> {
        let registry = self.registry.lock();
        let mut providers = KVec::with_capacity(registry.providers.len(), GFP_KERNEL)?;
        for provider in &registry.providers {
            providers.push(provider.clone(), GFP_KERNEL)?;
        }
        Ok(providers)
    }

    /// What was counted of one provider, or with 0 of all there ever were.
    pub(crate) fn stats(&self, id: u32, stats: &mut uapi::Stats) -> Answer {
        let registry = self.registry.lock();
        let mut found = id == 0;
        for provider in registry.providers.iter().filter(|p| id == 0 || p.id == id) {
            provider.counters.add_to(stats);
            found = true;
        }
        if id == 0 {
            self.past.add_to(stats);
        }
        drop(registry);
        if found {
            Ok(())
        } else {
            Err(refuse!(ENOENT, "there is no provider {}", id))
        }
    }

    // Paths.

    /// Forgets all paths: a function came or went, or the administrator changed ACS.
    pub(crate) fn forget_paths(&self) {
        self.generation.fetch_add(1, Relaxed);
    }

    /// The paths from each provider to each client, all clients of the first provider first.
    pub(crate) fn paths(&self, providers: &[Arc<Provider>], clients: &[Function]) -> Result<KVec<Path>> {
        let generation = self.generation();
        let mut paths = KVec::with_capacity(providers.len() * clients.len(), GFP_KERNEL)?;
        let mut missing = 0;
        let mut registry = self.registry.lock();
        let old = registry.cache.renew(generation);
        for provider in providers {
            for client in clients {
                let path = registry.cache.get(provider.id, client.address());
                missing += usize::from(path.is_none());
                paths.push(path, GFP_KERNEL)?;
            }
        }
        drop(registry);
        drop(old);
        if missing > 0 {
            self.compute(generation, providers, clients, &mut paths)?;
        }
        let mut all = KVec::with_capacity(paths.len(), GFP_KERNEL)?;
        for path in paths.iter().flatten() {
            all.push(*path, GFP_KERNEL)?;
        }
        Ok(all)
    }

    /// The path from one provider to one client.
    pub(crate) fn path(&self, provider: &Arc<Provider>, client: &Function) -> Result<Path> {
        let (from, to) = (core::slice::from_ref(provider), core::slice::from_ref(client));
        self.paths(from, to)?.pop().ok_or(EINVAL)
    }

    /// Computes the paths that are missing, and remembers them.
    fn compute(
        &self,
        generation: u64,
        providers: &[Arc<Provider>],
        clients: &[Function],
        paths: &mut [Option<Path>],
    ) -> Result {
        let mut walks = KVec::with_capacity(clients.len(), GFP_KERNEL)?;
        for client in clients {
            walks.push(Walk::new(client)?, GFP_KERNEL)?;
        }
        let mut slots = paths.iter_mut();
        for provider in providers {
            let mut own = None;
            for (client, walk) in clients.iter().zip(&walks) {
                let Some(slot) = slots.next().filter(|slot| slot.is_none()) else {
                    continue;
                };
                if own.is_none() {
                    own = Some(Walk::new(provider.function())?);
                }
                let Some(own) = &own else { continue };
                let path = own.path_to(provider.function(), client, walk);
                *slot = Some(path);
                let node = RBTreeNode::new((provider.id, client.address()), path, GFP_KERNEL)?;
                self.registry.lock().cache.put(generation, node);
            }
        }
        Ok(())
    }

    // Choosing.

    /// How often a decision is made anew because the rules changed meanwhile: a bound, should they change each time.
    const RULE_CHANGES: u32 = 16;

    /// Decides, and with `take` allocates as well.
    fn choose(&self, wish: &Wish, file: u64, take: bool) -> Answer<(Option<Holder>, Account)> {
        for _ in 0..Self::RULE_CHANGES {
            let judge = Judge::new(&self.rules, wish.own.clone(), file);
            if let Some(chosen) = self.choose_by(&judge, wish, take.then_some(file))? {
                return Ok(chosen);
            }
        }
        Err(refuse!(EAGAIN, "the rules changed again and again"))
    }

    /// As [`Self::choose`]; none where the rules have become others.
    fn choose_by(
        &self,
        judge: &Judge<'_>,
        wish: &Wish,
        take: Option<u64>,
    ) -> Answer<Option<(Option<Holder>, Account)>> {
        let providers = self.providers()?;
        let paths = self.paths(&providers, &wish.clients)?;
        let clients = wish.clients.len();
        let mut parties = KVec::new();
        for client in wish.clients.iter().filter(|_| !judge.is_silent()) {
            parties.push(client.party(), GFP_KERNEL)?;
        }
        let mut candidates = KVec::with_capacity(providers.len(), GFP_KERNEL)?;
        for (i, provider) in providers.iter().enumerate() {
            let room = provider.room(wish.size, wish.align);
            let paths = paths.get(i * clients..(i + 1) * clients).unwrap_or_default();
            candidates.push(
                Candidate {
                    id: provider.id,
                    live: room.live,
                    start: provider.start,
                    size: provider.size,
                    free: room.free,
                    largest: room.largest,
                    paths,
                    ruling: judge.ruling(provider, &parties, paths, wish.size),
                },
                GFP_KERNEL,
            )?;
        }
        let strategy = match wish.strategy {
            consts::STRATEGY_UPSTREAM => Strategy::Upstream(self.upstream_choice(&providers, wish)?),
            consts::STRATEGY_SPREAD => Strategy::Spread,
            consts::STRATEGY_PACK => Strategy::Pack,
            _ => Strategy::Nearest,
        };
        let request = placement::Request {
            size: wish.size,
            align: wish.align,
            clients,
            named: wish.named,
            strategy,
            max_class: wish.max_class,
        };
        let mut verdicts = KVec::from_elem(Verdict::EMPTY, providers.len(), GFP_KERNEL)?;
        // Each round that ends without memory takes one candidate out of the race.
        loop {
            let decision = placement::decide(&request, &candidates, &mut verdicts);
            let chosen = decision.chosen.and_then(|at| Some((at, providers.get(at)?)));
            if chosen.is_none() && take.is_some() {
                for provider in &providers {
                    provider.counters.failed.fetch_add(1, Relaxed);
                }
            }
            if let (None, Some((at, provider))) = (take, chosen) {
                // Whether the cgroup may is known when it is charged.
                if provider.charge_cgroup(wish.size).is_err_and(|e| e == EAGAIN) {
                    candidates[at].ruling.over_cgroup = true;
                    continue;
                }
            }
            let mut held = None;
            if let (Some(file), Some((at, provider))) = (take, chosen) {
                match self.take(judge, wish, provider, file) {
                    Ok(holder) => held = Some(holder),
                    Err(Uncharged::Broken(broken)) => {
                        breaks(&mut candidates[at].ruling, broken);
                        continue;
                    }
                    Err(Uncharged::Cgroup) => {
                        candidates[at].ruling.over_cgroup = true;
                        continue;
                    }
                    Err(Uncharged::Stale) => return Ok(None),
                    Err(Uncharged::Error(e)) if e == ENOSPC => {
                        candidates[at].refused(wish.size);
                        continue;
                    }
                    Err(Uncharged::Error(e)) if e == ENODEV => {
                        candidates[at].live = false;
                        continue;
                    }
                    Err(Uncharged::Error(e)) => return Err(e.into()),
                }
            }
            let decided = Decided {
                wish,
                judge,
                providers: &providers,
                candidates: &candidates,
                verdicts: &verdicts,
                outcome: decision.outcome,
            };
            let account = decided.account(chosen.map(|(_, provider)| provider))?;
            trace::decision(|| trace::Decision {
                size: wish.size,
                align: wish.align,
                file: judge.file(),
                clients,
                providers: providers.len(),
                strategy: wish.strategy,
                chosen: account.chosen,
                error: account.error as u32,
                dry: take.is_none(),
            });
            return Ok(Some((held, account)));
        }
    }

    /// Allocates a buffer in a provider, and charges it.
    fn take(
        &self,
        judge: &Judge<'_>,
        wish: &Wish,
        provider: &Arc<Provider>,
        file: u64,
    ) -> core::result::Result<Holder, Uncharged> {
        let charge = judge.charge(provider, wish.size)?;
        provider
            .alloc(wish.size, wish.align)
            .and_then(|mut memory| {
                memory.charge = Some(charge);
                Buffer::create(provider.clone(), memory, wish.size, file)
            })
            .map_err(Uncharged::Error)
    }

    /// What the kernel itself would choose, if that is a provider of ours.
    fn upstream_choice(&self, providers: &[Arc<Provider>], wish: &Wish) -> Result<Option<u32>> {
        let found = p2pdma::find_many(&wish.clients)?;
        Ok(found.and_then(|f| providers.iter().find(|p| p.function().same(&f)).map(|p| p.id)))
    }

    /// Allocates a buffer for a file.
    pub(crate) fn alloc(&self, wish: &Wish, file: u64) -> Answer<(Option<Holder>, Account)> {
        self.choose(wish, file, true)
    }

    /// Says what an allocation would do.
    pub(crate) fn explain(&self, wish: &Wish, file: u64) -> Answer<Account> {
        Ok(self.choose(wish, file, false)?.1)
    }

    // Providers that come.

    /// Publishes a BAR of a device that is bound to the module's driver.
    pub(crate) fn publish(&self, wanted: &Publication) -> Answer<u32> {
        let addr = wanted.addr;
        driver::with_bound(addr, |device| self.publish_bound(wanted, device)).unwrap_or_else(|| {
            Err(match Function::find(addr) {
                None => refuse!(ENODEV, "{} is no PCI function of this machine", addr),
                Some(_) => refuse!(
                    ENODEV,
                    "{} is not bound to the p2pmem driver: set its driver_override to p2pmem, unbind it, and probe it again",
                    addr
                ),
            })
        })
    }

    fn publish_bound(&self, wanted: &Publication, mut device: driver::Published<'_>) -> Answer<u32> {
        let function = Function::of(device.device());
        let addr = wanted.addr;
        if self.find(&function).is_some() {
            return Err(refuse!(EEXIST, "{} is a provider already", addr));
        }
        let (bar, len) = match wanted.bar {
            Some(bar) => match function.bar(bar) {
                Some((_, len)) => (bar, len),
                None => return Err(refuse!(EINVAL, "{} has no memory BAR {}", addr, bar)),
            },
            None => (0..6)
                .filter(|&bar| function.is_64bit(bar) && function.prefetchable(bar))
                .filter_map(|bar| Some((bar, function.bar(bar)?.1)))
                .max_by_key(|&(bar, len)| (len, core::cmp::Reverse(bar)))
                .ok_or_else(|| {
                    refuse!(
                        EINVAL,
                        "{} has no prefetchable 64-bit BAR: name the one to publish",
                        addr
                    )
                })?,
        };
        let size = if wanted.size == 0 {
            len.saturating_sub(wanted.offset)
        } else {
            wanted.size
        };
        if wanted.offset % PAGE != 0 || size % PAGE != 0 {
            return Err(refuse!(
                EINVAL,
                "offset {} and size {} are not whole pages",
                wanted.offset,
                size
            ));
        }
        if size == 0 || wanted.offset.checked_add(size).is_none_or(|end| end > len) {
            return Err(refuse!(
                EINVAL,
                "{} bytes at offset {} do not fit into BAR {} of {}, which has {}",
                size,
                wanted.offset,
                bar,
                addr,
                len
            ));
        }
        if !wanted.pages {
            return self.publish_window(wanted, &device, bar, size);
        }
        let by_rule = self.rules.kernel_reserve(&function.party());
        let reserve = wanted
            .kernel_reserve
            .or(by_rule.map(|bytes| bytes.next_multiple_of(PAGE)))
            .unwrap_or_else(|| (size / 16).min(16 << 20) / PAGE * PAGE);
        if reserve % PAGE != 0 || reserve >= size {
            return Err(refuse!(
                EINVAL,
                "a kernel_reserve of {} is not a whole number of pages below the {} published",
                reserve,
                size
            ));
        }
        device.add_range(bar, wanted.offset, size).map_err(|e| match e {
            e if e == EBUSY => refuse!(
                e,
                "another range of {} was published since it was bound: unbind it to change that, or another driver has the range",
                addr
            ),
            e => refuse!(e, "the kernel does not make pages for BAR {} of {}", bar, addr),
        })?;
        p2pdma::publish(device.device(), true);
        let made = self.make_own(wanted, &function, bar, size, reserve);
        if reserve == 0 || made.is_err() {
            // There is nothing to be had for other drivers.
            p2pdma::publish(device.device(), false);
        }
        made
    }

    /// Makes a provider of what was given pages just now.
    fn make_own(&self, wanted: &Publication, function: &Function, bar: u32, size: u64, reserve: u64) -> Answer<u32> {
        let addr = function.address();
        let pool = bus::pool(function)?.ok_or_else(|| {
            refuse!(
                EIO,
                "the kernel does not find the memory of {} that was just published",
                addr
            )
        })?;
        let slab = pool.take(size - reserve).ok_or_else(|| {
            refuse!(
                EBUSY,
                "other drivers use memory of {} that should be handed out: raise kernel_reserve",
                addr
            )
        })?;
        let at = function.bar(bar).map_or(0, |(at, _)| at);
        if slab.phys() != at + wanted.offset {
            return Err(refuse!(EBUSY, "other drivers use the first bytes of {}'s pool", addr));
        }
        self.add_own(wanted, function, bar, reserve, Backing::Pages(slab))
    }

    /// Makes a provider of a range that gets no pages.
    fn publish_window(&self, wanted: &Publication, device: &driver::Published<'_>, bar: u32, size: u64) -> Answer<u32> {
        let addr = wanted.addr;
        if wanted.kernel_reserve.is_some_and(|reserve| reserve > 0) {
            return Err(refuse!(
                EINVAL,
                "without pages {} has no pool of the kernel's that a kernel_reserve could be in: set it to 0 or auto",
                addr
            ));
        }
        let window = device.window(bar, wanted.offset, size).map_err(|e| match e {
            e if e == EBUSY => refuse!(
                e,
                "{} was given pages since it was bound: unbind it to publish it without",
                addr
            ),
            e => refuse!(e, "BAR {} of {} cannot be mapped", bar, addr),
        })?;
        self.add_own(wanted, &Function::of(device.device()), bar, 0, Backing::Window(window))
    }

    /// Makes a provider of memory of a device that is bound to the driver.
    fn add_own(
        &self,
        wanted: &Publication,
        function: &Function,
        bar: u32,
        reserve: u64,
        backing: Backing,
    ) -> Answer<u32> {
        let parts = Parts {
            id: self.new_id(),
            function: function.clone(),
            bar: Some(bar),
            start: wanted.offset,
            kernel_reserve: reserve,
            combine: function.prefetchable(bar),
            pinned_exports: wanted.pinned_exports,
        };
        let provider = Provider::own(parts, backing)?;
        self.add(&provider)?;
        pr_info!(
            "{}: published {} bytes of BAR {} at offset {}{}\n",
            provider.addr,
            provider.size,
            bar,
            wanted.offset,
            if provider.has_pages() { "" } else { ", without pages" }
        );
        Ok(provider.id)
    }

    /// Changes whether a function's memory may be exported to importers that cannot be revoked, if it is a provider.
    pub(crate) fn set_pinned_exports(&self, addr: PciAddr, allow: bool) {
        let registry = self.registry.lock();
        if let Some(provider) = registry.providers.iter().find(|p| p.addr == addr) {
            provider.set_pinned_exports(allow);
        }
    }

    /// Makes a provider of a device whose own driver has published memory, if there is one that is not known yet.
    pub(crate) fn adopt(&self, function: &Function) -> Result {
        if self.find(function).is_some() || driver::with_bound(function.address(), |_| ()).is_some() {
            return Ok(());
        }
        let Some(pool) = bus::pool(function)? else {
            return Ok(());
        };
        // One page tells what was published.
        let Some(probe) = pool.take(PAGE) else {
            pr_notice!("{}: its driver uses all memory that it published\n", function.address());
            return Ok(());
        };
        let (phys, len) = probe.published_range();
        drop(probe);
        let bar = (0..6).find_map(|bar| {
            let (start, size) = function.bar(bar)?;
            let offset = phys.checked_sub(start)?;
            (offset < size).then_some((bar, offset))
        });
        // An eighth stays for the driver, whose memory it is.
        let reserve = (len / 8).next_multiple_of(PAGE);
        let size = len.saturating_sub(reserve);
        let mut ceiling = size;
        while ceiling >= PAGE && pool.take(ceiling).is_none() {
            ceiling = ceiling / 2 / PAGE * PAGE;
        }
        if size == 0 || ceiling == 0 {
            return Ok(());
        }
        let parts = Parts {
            id: self.new_id(),
            function: function.clone(),
            bar: bar.map(|(bar, _)| bar),
            start: bar.map_or(0, |(_, offset)| offset),
            kernel_reserve: reserve,
            combine: bar.is_some_and(|(bar, _)| function.prefetchable(bar)),
            pinned_exports: false,
        };
        let provider = Provider::adopted(parts, pool, size, ceiling)?;
        self.add(&provider).map_err(|refusal| refusal.error)?;
        pr_info!(
            "{}: adopted {} of the {} bytes that its driver published\n",
            provider.addr,
            size,
            len
        );
        Ok(())
    }

    /// Looks for devices whose drivers have published memory.
    pub(crate) fn scan(&self) -> Result {
        let mut at = Function::next(None);
        while let Some(function) = at {
            if !function.is_bridge() {
                self.adopt(&function)?;
            }
            at = Function::next(Some(function));
        }
        Ok(())
    }

    fn new_id(&self) -> u32 {
        let mut registry = self.registry.lock();
        let id = registry.next_id;
        registry.next_id += 1;
        id
    }

    fn add(&self, provider: &Arc<Provider>) -> Answer {
        let mut registry = self.registry.lock();
        if registry
            .providers
            .iter()
            .any(|p| p.function().same(provider.function()))
        {
            return Err(refuse!(EEXIST, "{} is a provider already", provider.addr));
        }
        let at = registry.providers.iter().take_while(|p| p.id < provider.id).count();
        registry.providers.reserve(1, GFP_KERNEL)?;
        // There is room for one more.
        let _ = registry.providers.insert_within_capacity(at, provider.clone());
        drop(registry);
        self.forget_paths();
        self.tell(consts::EVENT_PROVIDER_ADDED, provider.id, None);
        Ok(())
    }

    /// Whether there is a provider of that number.
    pub(crate) fn is_provider(&self, id: u32) -> bool {
        self.registry.lock().providers.iter().any(|p| p.id == id)
    }

    fn find(&self, function: &Function) -> Option<Arc<Provider>> {
        self.registry
            .lock()
            .providers
            .iter()
            .find(|p| p.function().same(function))
            .cloned()
    }

    // Providers that leave.

    /// Takes back what [`Self::publish`] made of a device.
    pub(crate) fn unpublish(&self, addr: PciAddr) -> Answer {
        driver::with_bound(addr, |device| {
            let function = Function::of(device.device());
            p2pdma::publish(device.device(), false);
            function
        })
        .map(|function| self.leave(&function, Leave::Retire))
        .ok_or_else(|| refuse!(ENODEV, "{} is not bound to the p2pmem driver any more", addr))
    }

    /// Ends the provider that a function is, if it is one. When this returns nobody can reach its memory through
    /// p2pmem any more.
    pub(crate) fn leave(&self, function: &Function, leave: Leave) {
        let Some(provider) = self.find(function) else {
            return;
        };
        let Some(stopped) = provider.stop() else {
            // Another one is at it.
            return provider.await_end();
        };
        let mut revoked = 0u32;
        provider.for_each_buffer(|buffer| revoked += u32::from(self.revoke(buffer)));
        // All were told to let go before anyone is waited for.
        let mut patience = Patience::new();
        provider.for_each_buffer(|buffer| self.finish_revoke(buffer, &mut patience));
        provider.drain(stopped, leave);
        let mut registry = self.registry.lock();
        let at = registry.providers.iter().position(|p| p.id == provider.id);
        let removed = at.and_then(|at| registry.providers.remove(at).ok());
        let mut sum = uapi::Stats::default();
        provider.counters.add_to(&mut sum);
        self.past.add(&sum);
        drop(registry);
        drop(removed);
        provider.ended();
        self.forget_paths();
        self.tell(consts::EVENT_PROVIDER_REMOVED, provider.id, None);
        pr_info!(
            "{}: no provider any more, {} buffers were revoked\n",
            provider.addr,
            revoked
        );
    }

    /// Takes one buffer away from all who hold it: no new mappings, no old ones of user space, and importers and
    /// adapters are told to let go. False when it had ended already.
    fn revoke(&self, buffer: &Arc<Buffer>) -> bool {
        if !buffer.revoke() {
            return false;
        }
        let (_, mappings) = buffer.status();
        trace::revoke(|| (buffer.about(), mappings, buffer.exports().0));
        self.space.unmap(buffer.page_offset, buffer.size / PAGE);
        buffer.for_each_export(|export| export.revoke());
        buffer.for_each_registration(|registration| registration.revoke());
        buffer.provider.counters.revoked.fetch_add(1, Relaxed);
        self.tell(consts::EVENT_BUFFER_REVOKED, buffer.provider.id, Some(buffer));
        if log::allowed() {
            pr_info!(
                "{}: revoked a buffer of {} bytes with {} mappings of {}\n",
                buffer.provider.addr,
                buffer.size,
                mappings,
                buffer.owner
            );
        }
        true
    }

    /// Ends a buffer that was revoked: waits for its importers and adapters, and gives its memory back.
    fn finish_revoke(&self, buffer: &Arc<Buffer>, patience: &mut Patience) {
        if buffer.status().0 == State::Revoking {
            buffer.for_each_export(|export| export.await_idle(patience));
            buffer.for_each_registration(|registration| registration.await_idle());
            buffer.finish_revoke();
        }
    }

    /// Ends all providers, as the module is going away.
    pub(crate) fn shutdown(&self) {
        loop {
            let first = self.registry.lock().providers.first().cloned();
            let Some(provider) = first else { return };
            self.leave(provider.function(), Leave::Retire);
        }
    }
}

impl bus::Listener for Orchestrator {
    fn bound(&self, function: &Function) {
        if let Err(e) = self.adopt(function) {
            pr_warn!("{}: cannot be adopted (errno {})\n", function.address(), -e.to_errno());
        }
    }

    fn unbinding(&self, function: &Function) {
        // An own provider leaves in the driver's own call, which comes next.
        if self.find(function).is_some_and(|p| p.kind == Kind::Adopted) {
            self.leave(function, Leave::Unbind);
        }
    }

    fn changed(&self) {
        self.forget_paths();
    }
}

/// Bus addresses tell where things are in the machine, which is not for everyone to know.
pub(crate) fn visible_bus_addr(buffer: &Buffer) -> u64 {
    if capable_admin() {
        buffer.bus_addr
    } else {
        0
    }
}

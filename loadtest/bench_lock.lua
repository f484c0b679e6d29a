-- sysbench: lock a random row and release it, with the statements that loadtest/bench.py passes as the router's own.

sysbench.cmdline.options = {
   statement = {"the locking SELECT: a format of table, slot and two halves of a key's hash", ""},
   session = {"what makes a fresh connection one for row locks", ""},
   tables = {"lock tables", 8},
   buckets = {"buckets of the topology", 64},
   rows = {"rows of a bucket", 256},
}

function thread_init()
   connection = sysbench.sql.driver():connect()
   connection:query(sysbench.opt.session)
end

function event()
   local bucket = sysbench.rand.uniform(0, sysbench.opt.buckets - 1)
   local slot = bucket * sysbench.opt.rows + sysbench.rand.uniform(0, sysbench.opt.rows - 1)
   local half = sysbench.rand.uniform(0, 2147483647)
   local reply = connection:query(
      string.format(sysbench.opt.statement, bucket % sysbench.opt.tables, slot, half, half))
   if reply.nrows ~= 1 then
      error("row " .. slot .. " is missing")
   end
   connection:query("ROLLBACK")
end

function thread_done()
   connection:disconnect()
end
